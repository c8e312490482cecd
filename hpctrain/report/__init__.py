"""One page about a run: its losses, speed, time, memory and traffic."""
