"""Layers that predict further tokens, put together from parts of ``transformers``, which has no code for them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]


class Further:
    """Such a layer behind a model, with random weights: one of its layers that attend, norms, and a projection.

    Files have it as Qwen's and DeepSeek's do; see :meth:`save`.
    """

    def __init__(self, theirs: Any, seed: int = 11):
        torch.manual_seed(seed)
        config = theirs.config
        self.theirs, self.width, self.streams = theirs, config.hidden_size, getattr(config, "hc_count", 1)
        self.latent = config.model_type == "deepseek_v3"
        model = self.model = copy.deepcopy(theirs.model)
        self.layer = model.layers[-1]
        norm = type(model.hyper_connection_mixer.hc_norm if self.streams > 1 else model.norm)
        model.layers = torch.nn.ModuleList([self.layer])
        model.config.num_hidden_layers, model.config.ple_layer_ids = 1, []
        self.parts = torch.nn.ModuleDict(
            {
                "enorm": norm(self.width, eps=config.rms_norm_eps),
                "hnorm": norm(self.streams * self.width, eps=config.rms_norm_eps),
                "projection": torch.nn.Linear(2 * self.width, self.width, bias=False),
                "end": model.hyper_connection_mixer if self.streams > 1 else model.norm,
            }
        )
        with torch.no_grad():
            for name, parameter in [*self.layer.named_parameters(), *self.parts.named_parameters()]:
                if "norm" in name or name == "end.weight":
                    parameter.add_(0.4 * torch.randn_like(parameter))
                else:
                    parameter.normal_(0, 1.3 / parameter.shape[-1] ** 0.5)

    def save(self, path: Path) -> None:
        """Add it to the folder of the model."""
        file = path / "model.safetensors"
        save_file({**load_file(file), **(self._deepseek() if self.latent else self._qwen())}, file, {"format": "pt"})

    def _qwen(self) -> Tensors:
        parts = {
            "pre_fc_norm_embedding.weight": self.parts["enorm"].weight,
            "pre_fc_norm_hidden.weight": self.parts["hnorm"].weight,
        }
        projection = self.parts["projection"].weight
        if self.streams > 1:
            parts["fc_embedding.weight"], parts["fc_hidden.weight"] = projection.split(self.width, dim=1)
        else:
            parts["fc.weight"] = projection
        end = "hyper_connection_mixer" if self.streams > 1 else "norm"
        parts |= {f"{end}.{name}": tensor for name, tensor in self.parts["end"].state_dict().items()}
        parts |= {f"layers.0.{name}": tensor for name, tensor in self.layer.state_dict().items() if "ple." not in name}
        return {f"mtp.{name}": _array(tensor) for name, tensor in parts.items()}

    def _deepseek(self) -> Tensors:
        parts = {
            "enorm.weight": self.parts["enorm"].weight,
            "hnorm.weight": self.parts["hnorm"].weight,
            "eh_proj.weight": self.parts["projection"].weight,
            "shared_head.norm.weight": self.parts["end"].weight,
            "shared_head.head.weight": self.theirs.lm_head.weight,  # copies, as in the published files
            "embed_tokens.weight": self.theirs.model.embed_tokens.weight,
        }
        for name, tensor in self.layer.state_dict().items():
            if name == "mlp.experts.gate_up_proj":
                for number, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    parts |= {f"mlp.experts.{number}.{kind}_proj.weight": t for kind, t in (("gate", gate), ("up", up))}
            elif name == "mlp.experts.down_proj":
                parts |= {f"mlp.experts.{number}.down_proj.weight": one for number, one in enumerate(tensor)}
            else:
                parts[name] = tensor
        number = self.theirs.config.num_hidden_layers
        return {f"model.layers.{number}.{name}": _array(tensor) for name, tensor in parts.items()}

    @torch.no_grad()
    def drafts(self, tokens: np.ndarray, count: int) -> list[np.ndarray]:
        """Logits ``(vocab,)`` of ``count`` tokens behind ``tokens``, each guess the likeliest of those before."""
        ids = torch.from_numpy(tokens.astype(np.int64))
        hidden = torch.cat([torch.zeros(1, self.streams * self.width), self._trunk(ids[:-1])])
        found = []
        for _ in range(count):
            out = self._run(self._enter(ids, hidden))
            end = self.parts["end"](out) if self.streams > 1 else out
            logits = self.theirs.lm_head(end[-1:])
            found.append(logits[0].numpy())
            ids, hidden = torch.cat([ids, logits.argmax(-1)]), torch.cat([hidden, out[-1:]])
        return found

    def _trunk(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's hidden rows: what its head takes, or all streams where a mixer is before that."""
        seen: list[torch.Tensor] = []
        hook = self.theirs.model.layers[-1].register_forward_hook(lambda layer, args, out: seen.append(out))
        last = self.theirs.model(ids[None], use_cache=False).last_hidden_state[0]
        hook.remove()
        return seen[0][0] if self.streams > 1 else last

    def _enter(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.parts["enorm"](self.theirs.model.embed_tokens(ids))
        streams = self.parts["hnorm"](hidden).unflatten(-1, (self.streams, self.width))
        both = torch.cat([embedded[:, None].expand_as(streams), streams], dim=-1)
        return self.parts["projection"](both).flatten(1)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        """Through the layer (and the norm behind it, where there are no streams) as a model of one layer."""
        seen: list[torch.Tensor] = []
        hooks = [
            self.layer.register_forward_pre_hook(lambda layer, args: (x[None], *args[1:])),
            self.layer.register_forward_hook(lambda layer, args, out: seen.append(out)),
        ]
        last = self.model(inputs_embeds=torch.zeros(1, len(x), self.width), use_cache=False).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        return seen[0][0] if self.streams > 1 else last


def _array(tensor: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().numpy())
