"""Studies: many runs from one file, here or as a Slurm array, and the tables that compare them."""
