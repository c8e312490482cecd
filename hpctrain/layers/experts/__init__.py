"""Mixtures of experts: a router chooses some experts for each token, whose rows travel to the ranks that hold them."""
