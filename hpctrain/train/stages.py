"""What the pipeline's executor runs: a rank's stages on the microbatches of one step."""

from __future__ import annotations


class Stages:
    """The stages of a model such as `models.gpt2.GPT2`; see `pipeline.executor.Work`."""

    def __init__(self, model, microbatches: list):
        self.model, self.microbatches = model, microbatches

    def room(self, action):
        return self.model.room(self.microbatches[action.microbatch].tokens)

    def forward(self, action, inputs):
        batch = self.microbatches[action.microbatch]
        y = self.compute(action, inputs[0] if inputs else batch.ids, batch.tokens)
        return self.model.loss(y, batch.targets, batch.scale) if action.stage == self.model.last else y

    def compute(self, action, x, tokens):
        return self.model(x, tokens, action.stage)
