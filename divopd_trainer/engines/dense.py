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
from divopd_trainer.engines.layout import Layout, sequence_layout, slot_layout
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
    """One batch of tokens.

    Attributes:
        ids: int64 [N].
        cos: [N, 1, dim].
        sin: [N, 1, dim].
        layout: Who attends to what in all layers but the last.
        keep: int64 [M], the tokens whose final state is wanted: the last layer computes no others.
        last: Their attention in the last layer.
        write: int64 [N * kv_heads], rows of the flattened buffers [slots * kv_heads * T]; None: no slots are used.
    """

    ids: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout
    keep: torch.Tensor
    last: Layout
    write: torch.Tensor | None = None


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
        exact = self.dtype == torch.float32
        reference = expected.log_softmax(-1)
        for name, got, want in (
            ("a whole sequence", whole, reference),
            ("one token at a time", torch.stack(pieces), reference[16:]),
        ):
            apart = (got.log_softmax(-1) - want).abs()
            # In half precision single logits are rounded by more than this, the larger the model the more.
            difference = float(apart.max() if exact else (apart * want.exp()).sum(-1).mean())
            if not difference < (1e-4 if exact else 0.1):
                return f"log-probs of {name} differ by {difference:.2g} from the model's own forward pass"
        return None

    @torch.inference_mode()
    def extend(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """See `divopd_trainer.engines.backends.Backend.extend`."""
        # One-token feeds first, by slot: their attention is one batched call over a range of slots.
        order = sorted(range(len(feeds)), key=lambda i: (len(feeds[i].ids) > 1, feeds[i].slot))
        sorted_feeds = [feeds[i] for i in order]
        slots = np.array([f.slot for f in sorted_feeds])
        starts = np.array([f.start for f in sorted_feeds])
        counts = np.array([len(f.ids) for f in sorted_feeds])
        ends = np.cumsum(counts)
        ids = np.concatenate([np.asarray(f.ids, np.int64) for f in sorted_feeds])
        positions = np.arange(len(ids)) + np.repeat(starts - ends + counts, counts)
        self.buffers.reserve(int((starts + counts).max()))
        rows = np.repeat(slots, counts)[:, None] * self._kv_heads + np.arange(self._kv_heads)
        write = self._index(rows * self.buffers.capacity + positions[:, None])
        layout = slot_layout(slots, starts, counts, self.device, self.dtype)
        wanted = np.array([i for i, f in enumerate(sorted_feeds) if f.wanted], np.int64)
        by_slot = wanted[np.argsort(slots[wanted])]
        if len(by_slot) == len(ids):
            last = layout
        else:
            # Whatever a feed's length, only its last token goes through the whole last layer.
            at = (starts + counts - 1)[by_slot]
            last = slot_layout(slots[by_slot], at, np.ones_like(at), self.device, self.dtype)
        x = self._forward(self._plan(ids, positions, layout, ends[by_slot] - 1, last, write))
        if len(by_slot) > 1 or len(by_slot) != len(x):
            # Back to the order in which the feeds came.
            came = np.argsort(np.array(order)[by_slot])
            x = x.index_select(0, self._index(came))
        return self.head(x)

    @torch.inference_mode()
    def hidden(self, sequences: Sequence[np.ndarray], positions: Sequence[np.ndarray]) -> torch.Tensor:
        """See `divopd_trainer.engines.backends.Backend.hidden`."""
        lengths = [len(s) for s in sequences]
        ends = np.cumsum(lengths)
        keep = np.concatenate(
            [end - n + np.asarray(p, np.int64) for end, n, p in zip(ends, lengths, positions)]
        )
        layout = sequence_layout(lengths, None, self.device, self.dtype)
        last = sequence_layout(lengths, positions, self.device, self.dtype)
        at = np.concatenate([np.arange(n) for n in lengths])
        return self._forward(self._plan(np.concatenate(sequences), at, layout, keep, last))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `divopd_trainer.engines.backends.Backend.head`."""
        return F.linear(hidden, self.model.lm_head.weight, self.model.lm_head.bias)

    def _index(self, places: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(places.astype(np.int64, copy=False).ravel()).to(self.device)

    def _plan(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        layout: Layout,
        keep: np.ndarray,
        last: Layout,
        write: torch.Tensor | None = None,
    ) -> _Plan:
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            self._grow_rope(needed)
        at = self._index(positions)
        cos, sin = self._cos.index_select(0, at)[:, None], self._sin.index_select(0, at)[:, None]
        return _Plan(self._index(ids), cos, sin, layout, self._index(keep), last, write)

    def _forward(self, plan: _Plan) -> torch.Tensor:
        """Final states [M, D], after the final norm, of the tokens that are wanted."""
        x = F.embedding(plan.ids, self.model.model.embed_tokens.weight)
        dim, q, kv = self._dim, self._q_heads, self._kv_heads
        norms = None
        if self._qk_norm is not None:
            norms = self._qk_norm.index_select(1, self._head_kind)
        for index, layer in enumerate(self._layers):
            normed = self._rms(x, layer.norm1)
            layout, heads_norm = plan.layout, None if norms is None else norms[index]
            if index + 1 < len(self._layers) or len(plan.keep) == len(plan.ids):
                qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, q + 2 * kv, dim)
                turned = self._turn(qkv[:, : q + kv], heads_norm, plan.cos, plan.sin)
                queries, keys, values = turned[:, :q], turned[:, q:], qkv[:, q + kv :]
            else:
                layout = plan.last
                weight, bias = layer.qkv, layer.qkv_bias
                pair = F.linear(normed, weight[q * dim :], None if bias is None else bias[q * dim :])
                pair = pair.view(-1, 2 * kv, dim)
                heads_norm_k = None if heads_norm is None else heads_norm[q:]
                keys, values = self._turn(pair[:, :kv], heads_norm_k, plan.cos, plan.sin), pair[:, kv:]
                x, normed = x.index_select(0, plan.keep), normed.index_select(0, plan.keep)
                queries = F.linear(normed, weight[: q * dim], None if bias is None else bias[: q * dim])
                cos, sin = plan.cos.index_select(0, plan.keep), plan.sin.index_select(0, plan.keep)
                heads_norm_q = None if heads_norm is None else heads_norm[:q]
                queries = self._turn(queries.view(-1, q, dim), heads_norm_q, cos, sin)
            if plan.write is not None:
                for buffer, new in ((self.buffers.keys, keys), (self.buffers.values, values)):
                    buffer[index].view(-1, dim).index_copy_(0, plan.write, new.reshape(-1, dim))
            attended = self._attend(index, layout, queries, keys, values)
            x = x + F.linear(attended, layer.out, layer.out_bias)
            gate_up = F.linear(self._rms(x, layer.norm2), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, -1)
            x = x + F.linear(self._act(gate) * up, layer.down, layer.down_bias)
        if len(plan.keep) == len(plan.ids):
            x = x.index_select(0, plan.keep)
        return self._rms(x, self.model.model.norm.weight)

    def _turn(
        self, heads: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Norm and rotary embedding of heads [N, H, dim]."""
        if norm is not None:
            heads = self._rms(heads, norm)
        return torch.addcmul(heads * cos, heads.roll(self._dim // 2, -1), sin)

    def _attend(
        self, index: int, layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention [M, q_heads * dim] of q [M, q_heads, dim]; k, v [N, kv_heads, dim] are this batch's own."""
        kv, dim, repeat = self._kv_heads, self._dim, self._repeat
        parts = []
        if layout.single:
            low, high = layout.lanes
            # The query heads that share a key head stand as its queries, so keys are not repeated.
            grouped = q[: layout.single].reshape(-1, kv, repeat, dim)
            if layout.place is not None:
                spread = grouped.new_zeros(high - low, kv, repeat, dim)
                grouped = spread.index_copy_(0, layout.place, grouped)
            out = F.scaled_dot_product_attention(
                grouped,
                self.buffers.keys[index][low:high, :, : layout.length],
                self.buffers.values[index][low:high, :, : layout.length],
                attn_mask=layout.mask,
                scale=self._scale,
            )
            if layout.place is not None:
                out = out.index_select(0, layout.place)
            parts.append(out.reshape(layout.single, -1))
        for piece in layout.pieces:
            if piece.slot < 0:
                own = slice(piece.begin, piece.begin + piece.length)
                row_k, row_v = k[own].transpose(0, 1), v[own].transpose(0, 1)
            else:
                row_k = self.buffers.keys[index][piece.slot, :, : piece.length]
                row_v = self.buffers.values[index][piece.slot, :, : piece.length]
            shape = (kv, repeat, piece.length, dim)
            out = F.scaled_dot_product_attention(
                q[piece.first : piece.end].view(-1, kv, repeat, dim).permute(1, 2, 0, 3),
                row_k[:, None].expand(shape),
                row_v[:, None].expand(shape),
                attn_mask=piece.mask,
                is_causal=piece.mask is None,
                scale=self._scale,
            )
            parts.append(out.permute(2, 0, 1, 3).reshape(piece.end - piece.first, -1))
        if not parts:
            return q.new_zeros(0, self._q_heads * dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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
