"""Backward from given gradients."""

import subprocess
import sys


def test_without_symbolic_shapes():
    program = """
import sys
import torch
from hpctrain.pipeline.given_gradients import scalar_of
x = torch.ones(2, requires_grad=True)
y = 3 * x
scalar_of([y, y], [torch.tensor([1.0, 2.0]), torch.ones(2)]).backward()
print(x.grad.tolist(), "sympy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[6.0, 9.0] False\n", done.stderr
