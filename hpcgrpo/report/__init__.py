"""`hpcgrpo report`: one self-contained HTML file of a run. No torch, no network."""
