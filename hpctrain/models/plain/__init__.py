"""Anybody's own torch module as a model: `model.kind = "package.module:function"`."""
