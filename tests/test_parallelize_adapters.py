"""Models of peft's kind: their adapters are saved whole, with the prompts that all ranks compute."""

import types

import pytest
import torch
from torch import nn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


class Base(nn.Module):
    def save_pretrained(self, folder, selected=None, is_main_process=True, state_dict=None):
        found = state_dict if state_dict is not None else self.state_dict()
        found = {name: tensor for name, tensor in found.items() if name.startswith("adapter.")}
        if self.peft_config["default"].is_prompt_learning:
            prompts = self.get_prompt_embedding_to_save("default")
            found = {"prompts": prompts, "weight": self.prompt_encoder["default"].weight.detach()}
        torch.save(found, folder / f"{selected}.pt")

    def get_prompt_embedding_to_save(self, name):
        return self.prompt_encoder[name](torch.arange(2)).detach()


class Adapted(Base):
    """As peft's PeftModel: it saves prompts that it computes, weights of their encoder and others of its state dict."""

    def __init__(self, learns_prompts):
        super().__init__()
        self.adapter = nn.Linear(4, 6)
        if learns_prompts:
            self.prompt_encoder = nn.ModuleDict({"default": nn.Embedding(2, 6)})
        self.peft_config = {"default": types.SimpleNamespace(is_prompt_learning=learns_prompts)}


@pytest.mark.parametrize("learns_prompts", [False, True])
def test_saved_whole(world, tmp_path, learns_prompts):
    grid, folder = ht.Grid(tensor=world.size), world.bcast(tmp_path)
    torch.manual_seed(0)
    model = Adapted(learns_prompts)
    expected = {f"adapter.{name}": tensor for name, tensor in model.adapter.state_dict().items()}
    if learns_prompts:
        weight = model.prompt_encoder["default"].weight.detach()
        expected = {"prompts": model.get_prompt_embedding_to_save("default"), "weight": weight}
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    ht.parallelize(model, grid)
    weights = list(model.parameters())
    model.save_pretrained(folder, "all", is_main_process=grid.rank == 0)
    assert all(mine is before for mine, before in zip(model.parameters(), weights, strict=True))
    state = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(torch.load(folder / "all.pt"), expected, rtol=0, atol=0)
        if learns_prompts:
            with pytest.raises(ValueError, match=r"of the adapter 'default', whose prompts all .* call save_pre"):
                model.save_pretrained(folder, "alone", state_dict=state)
        else:
            model.save_pretrained(folder, "alone", state_dict=state)
            torch.testing.assert_close(torch.load(folder / "alone.pt"), expected, rtol=0, atol=0)
