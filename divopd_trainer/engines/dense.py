"""A short forward pass for dense decoder models (Llama, Qwen2, Qwen3): few operations, no padding.

All new tokens of a batch share one set of matrix products, and only attention looks at the slots. It runs on the
transformers model's own parameters, which become views into fused matrices: loading weights in place is seen at
once. `check` compares it with the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from divopd_trainer.engines.backends import Feed, max_positions
from divopd_trainer.engines.slot_cache import KVBuffers

__all__ = ["DenseBackend"]

_FAMILIES = ("llama", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass
class _Layer:
    norm1: torch.Tensor
    norm2: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass
class _Plan:
    """Where the tokens of one batch lie, worked out once for all layers."""

    ids: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    write: torch.Tensor | None = None  # rows of the flattened buffers [slots * kv_heads * T]
    decode: int = 0  # the first tokens belong to feeds of one token
    lanes: tuple[int, int] = (0, 0)  # slots low ... high of those
    scatter: torch.Tensor | None = None
    decode_mask: torch.Tensor | None = None
    length: int = 0
    # (first token, end token, slot or -1, past + new length, mask or None)
    prefill: tuple[tuple[int, int, int, int, torch.Tensor | None], ...] = ()


class DenseBackend:
    """See the module's docstring; the interface is `divopd_trainer.engines.backends.Backend`.

    Args:
        model: A causal LM for which `unsupported` returns None.
        slots: How many conversations fit.
    """

    def __init__(self, model: Any, slots: int) -> None:
        self.model = model
        self.buffers = KVBuffers(slots)
        body = model.model
        self.device = body.embed_tokens.weight.device
        self.dtype = body.embed_tokens.weight.dtype
        self.vocab_size = int(model.lm_head.weight.shape[0])
        attention = body.layers[0].self_attn
        self._dim = int(attention.head_dim)
        self._q_heads = attention.q_proj.out_features // self._dim
        self._kv_heads = attention.k_proj.out_features // self._dim
        self._repeat = self._q_heads // self._kv_heads
        self._scale = float(attention.scaling)
        self._eps = float(body.norm.variance_epsilon)
        self._act = body.layers[0].mlp.act_fn
        self._layers = [self._take_layer(layer) for layer in body.layers]
        self._qk_norm = None
        if hasattr(attention, "q_norm"):
            self._qk_norm = _stack([[x.self_attn.q_norm, x.self_attn.k_norm] for x in body.layers])
            kinds = [0] * self._q_heads + [1] * self._kv_heads
            self._head_kind = torch.tensor(kinds, device=self.device)
        self._grow_rope(256)
        empty = torch.zeros(1, self._kv_heads, 1, self._dim, device=self.device, dtype=self.dtype)
        for index in range(len(self._layers)):
            self.buffers.ensure_layer(index, empty, empty)

    @staticmethod
    def unsupported(model: Any) -> str | None:
        """Why a model cannot run here, or None."""
        config = model.config.get_text_config()
        if config.model_type not in _FAMILIES:
            return f"its type is not one of {_FAMILIES}"
        rope = getattr(getattr(model.model, "rotary_emb", None), "rope_type", None)
        if rope not in _ROPES:
            return f"its rotary embedding is of type {rope!r}"
        projections = [
            m for layer in model.model.layers for m in layer.modules() if m.__class__.__name__ == "Linear"
        ]
        if len(projections) != 7 * len(model.model.layers) or any(
            type(m) is not torch.nn.Linear for m in projections
        ):
            return "its projections are quantised or adapted"
        return None

    @torch.inference_mode()
    def check(self) -> str | None:
        """Compare with the model's own forward pass; returns what differs, or None."""
        rng = np.random.default_rng(0)
        ids = rng.integers(0, self.vocab_size, 24).astype(np.int32)
        with torch.inference_mode():
            expected = (
                self.model(
                    input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(self.device), use_cache=False
                )
                .logits[0]
                .float()
            )
        whole = self.head(self.hidden([ids], [np.arange(24)])).float()
        self.extend([Feed(0, 0, ids[:10])])
        self.extend([Feed(0, 10, ids[10:16])])
        pieces = [self.extend([Feed(0, i, ids[i : i + 1])]).float()[0] for i in range(16, 24)]
        tolerance = 1e-4 if self.dtype == torch.float32 else 0.1
        reference = expected.log_softmax(-1)
        for name, got, want in (
            ("a whole sequence", whole, reference),
            ("one token at a time", torch.stack(pieces), reference[16:]),
        ):
            difference = float((got.log_softmax(-1) - want).abs().max())
            if not difference < tolerance:
                return f"log-probs of {name} differ by {difference:.2g} from the model's own forward pass"
        return None

    @torch.inference_mode()
    def extend(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """See `divopd_trainer.engines.backends.Backend.extend`."""
        # One-token feeds first, by slot: their attention is one batched call over a range of slots.
        order = sorted(range(len(feeds)), key=lambda i: (len(feeds[i].ids) > 1, feeds[i].slot))
        plan = self._plan_slots([feeds[i] for i in order])
        x = self._forward(plan)
        ends = np.cumsum([len(feeds[i].ids) for i in order]) - 1
        last = np.empty(len(feeds), np.int64)
        last[order] = ends
        keep = last[[f.wanted for f in feeds]]
        if len(keep) != len(x) or (keep != np.arange(len(x))).any():
            x = x.index_select(0, torch.from_numpy(keep).to(self.device))
        return self.head(self._rms(x, self.model.model.norm.weight))

    @torch.inference_mode()
    def hidden(self, sequences: Sequence[np.ndarray], positions: Sequence[np.ndarray]) -> torch.Tensor:
        """See `divopd_trainer.engines.backends.Backend.hidden`."""
        lengths = [len(s) for s in sequences]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        at = np.concatenate([np.arange(n) for n in lengths])
        plan = self._plan(np.concatenate(sequences), at)
        plan.prefill = tuple((int(a), int(b), -1, int(b - a), None) for a, b in zip(starts[:-1], starts[1:]))
        keep = np.concatenate([a + np.asarray(p, np.int64) for a, p in zip(starts, positions)])
        x = self._forward(plan).index_select(0, torch.from_numpy(keep).to(self.device))
        return self._rms(x, self.model.model.norm.weight)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `divopd_trainer.engines.backends.Backend.head`."""
        return F.linear(hidden, self.model.lm_head.weight, self.model.lm_head.bias)

    def _plan(self, ids: np.ndarray, positions: np.ndarray) -> _Plan:
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            self._grow_rope(needed)
        at = torch.from_numpy(positions.astype(np.int64, copy=False)).to(self.device)
        cos, sin = self._cos.index_select(0, at)[:, None], self._sin.index_select(0, at)[:, None]
        return _Plan(torch.from_numpy(ids.astype(np.int64)).to(self.device), cos, sin)

    def _plan_slots(self, feeds: list[Feed]) -> _Plan:
        counts = np.array([len(f.ids) for f in feeds])
        starts = np.array([f.start for f in feeds])
        slots = np.array([f.slot for f in feeds])
        offsets = np.cumsum(counts) - counts
        ids = np.concatenate([np.asarray(f.ids, np.int64) for f in feeds])
        positions = np.arange(len(ids)) + np.repeat(starts - offsets, counts)
        self.buffers.reserve(int((starts + counts).max()))
        plan = self._plan(ids, positions)
        rows = np.repeat(slots, counts)[:, None] * self._kv_heads + np.arange(self._kv_heads)
        plan.write = torch.from_numpy((rows * self.buffers.capacity + positions[:, None]).ravel()).to(
            self.device
        )
        decode = int((counts == 1).sum())
        if decode:
            low, high = int(slots[0]), int(slots[decode - 1]) + 1
            plan.decode, plan.lanes = decode, (low, high)
            plan.length = int(starts[:decode].max()) + 1
            last = np.zeros(high - low, np.int64)
            last[slots[:decode] - low] = starts[:decode]
            if high - low != decode:
                plan.scatter = torch.from_numpy(slots[:decode] - low).to(self.device)
            if (last != plan.length - 1).any():
                hidden = np.arange(plan.length) > last[:, None]
                mask = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, None]
                plan.decode_mask = torch.from_numpy(mask).to(self.device, self.dtype)
        prefill = []
        for i in range(decode, len(feeds)):
            first, n, past = int(offsets[i]), int(counts[i]), int(starts[i])
            mask = None
            if past:
                mask = torch.zeros(n, past + n, dtype=self.dtype, device=self.device)
                mask[:, past:].fill_(-torch.inf).triu_(1)
            prefill.append((first, first + n, int(slots[i]), past + n, mask))
        plan.prefill = tuple(prefill)
        return plan

    def _forward(self, plan: _Plan) -> torch.Tensor:
        """Hidden states [N, D] of all tokens before the final norm."""
        x = F.embedding(plan.ids, self.model.model.embed_tokens.weight)
        tokens, dim, q, kv = len(plan.ids), self._dim, self._q_heads, self._kv_heads
        half = dim // 2
        norms = None
        if self._qk_norm is not None:
            norms = self._qk_norm.index_select(1, self._head_kind)
        for index, layer in enumerate(self._layers):
            qkv = F.linear(self._rms(x, layer.norm1), layer.qkv, layer.qkv_bias).view(tokens, q + 2 * kv, dim)
            qk, v = qkv[:, : q + kv], qkv[:, q + kv :]
            if norms is not None:
                qk = self._rms(qk, norms[index])
            qk = torch.addcmul(qk * plan.cos, qk.roll(half, -1), plan.sin)
            attended = self._attend(index, plan, qk[:, :q], qk[:, q:], v)
            x = x + F.linear(attended, layer.out, layer.out_bias)
            gate_up = F.linear(self._rms(x, layer.norm2), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, -1)
            x = x + F.linear(self._act(gate) * up, layer.down, layer.down_bias)
        return x

    def _attend(
        self, index: int, plan: _Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention of q [N, q_heads, dim]; writes k, v [N, kv_heads, dim] to the slots first."""
        tokens, kv, dim, repeat = len(q), self._kv_heads, self._dim, self._repeat
        if plan.write is not None:
            keys, values = self.buffers.keys[index], self.buffers.values[index]
            keys.view(-1, dim).index_copy_(0, plan.write, k.reshape(-1, dim))
            values.view(-1, dim).index_copy_(0, plan.write, v.reshape(-1, dim))
        parts = []
        if plan.decode:
            low, high = plan.lanes
            # The query heads that share a key head stand as its queries, so keys are not repeated.
            grouped = q[: plan.decode].reshape(-1, kv, repeat, dim)
            if plan.scatter is not None:
                grouped = grouped.new_zeros(high - low, kv, repeat, dim).index_copy_(0, plan.scatter, grouped)
            out = F.scaled_dot_product_attention(
                grouped,
                keys[low:high, :, : plan.length],
                values[low:high, :, : plan.length],
                attn_mask=plan.decode_mask,
                scale=self._scale,
            )
            if plan.scatter is not None:
                out = out.index_select(0, plan.scatter)
            parts.append(out.reshape(plan.decode, -1))
        for first, end, slot, length, mask in plan.prefill:
            if slot < 0:
                row_k, row_v = k[first:end].transpose(0, 1), v[first:end].transpose(0, 1)
            else:
                row_k, row_v = keys[slot, :, :length], values[slot, :, :length]
            shape = (kv, repeat, length, dim)
            out = F.scaled_dot_product_attention(
                q[first:end].view(-1, kv, repeat, dim).permute(1, 2, 0, 3),
                row_k[:, None].expand(shape),
                row_v[:, None].expand(shape),
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._scale,
            )
            parts.append(out.permute(2, 0, 1, 3).reshape(end - first, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts).view(tokens, -1)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self._eps) * weight

    def _grow_rope(self, length: int) -> None:
        length = min(max(length, 256) * 2, max(max_positions(self.model), length))
        with torch.inference_mode():
            at = torch.arange(length, device=self.device)[None]
            probe = torch.zeros(1, device=self.device, dtype=self.dtype)
            cos, sin = self.model.model.rotary_emb(probe, at)
        half = self._dim // 2
        # Half-rotation is (-second, first); with the sign in the table it is a plain roll.
        self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)

    def _take_layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up, gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
        return _Layer(
            norm1=layer.input_layernorm.weight,
            norm2=layer.post_attention_layernorm.weight,
            qkv=qkv,
            qkv_bias=qkv_bias,
            out=attention.o_proj.weight,
            out_bias=attention.o_proj.bias,
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=mlp.down_proj.weight,
            down_bias=mlp.down_proj.bias,
        )


def _fuse(*projections: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One matrix for several projections of the same input; their parameters become views into it."""
    weight = torch.cat([p.weight.data for p in projections])
    bias = None if projections[0].bias is None else torch.cat([p.bias.data for p in projections])
    start = 0
    for projection in projections:
        end = start + projection.out_features
        projection.weight.data = weight[start:end]
        if bias is not None:
            projection.bias.data = bias[start:end]
        start = end
    return weight, bias


def _stack(modules: list[list[Any]]) -> torch.Tensor:
    """All weights of equal shape in one tensor [len(modules), len(modules[0]), ...]; they become views into it."""
    stacked = torch.stack([torch.stack([m.weight.data for m in row]) for row in modules])
    for i, row in enumerate(modules):
        for j, module in enumerate(row):
            module.weight.data = stacked[i, j]
    return stacked
