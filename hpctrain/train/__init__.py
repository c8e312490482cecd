"""Training: batches, steps, clipping, schedules, the run folder."""
