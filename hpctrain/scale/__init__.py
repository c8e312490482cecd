"""Scaling studies: points that grow from one configuration, measured in turn, and a report of what came out."""
