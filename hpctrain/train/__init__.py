"""Training: batches, steps, schedules, the run folder."""
