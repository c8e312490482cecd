"""What this machine offers, what will be used of it, and what to do about each shortfall."""
