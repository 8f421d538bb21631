"""What a run takes before it starts: memory, time and GPU-hours by closed forms, without a GPU and without torch."""
