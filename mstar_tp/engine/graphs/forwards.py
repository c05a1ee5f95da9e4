"""Forwards that were captured at start and are replayed for steps of any rows that fit.

Each graph is captured twice where adapters are served: with deltas, and base-only for steps without
an adapter row. All that a step changes stands in tables at fixed places; what is left over of a
graph's rows or tokens is padding, which addresses no slot and keeps no key or value. Captured by
the thread that starts the rank, replayed on the step thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mstar_tp.common.errors import LockstepError
from mstar_tp.engine.graphs.buckets import Choice, GraphKey, GraphSizes, Kind, StepShape, Variant
from mstar_tp.engine.graphs.device import Graph, GraphDevice
from mstar_tp.engine.graphs.inputs import StepInputs
from mstar_tp.engine.graphs.pieces import AttentionBuffers, Cutter, Pieces, Through
from mstar_tp.engine.model import ServedModel
from mstar_tp.engine.resources.base import StepBatch
from mstar_tp.engine.resources.lora.pools import LoraPools
from mstar_tp.layers.attention.attention import Attention, AttentionRow, ForwardContext
from mstar_tp.layers.attention.paged_plan import PagedPlanner, PlanBuffer
from mstar_tp.lora.device.tiles import TileBuffer


class Outputs(NamedTuple):
    """Hidden states [N, D] and, of a decode graph on rank 0, logits [N, V].

    They are in the graph's own memory, until any graph is replayed.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables where graphs of one kind and size read a step.

    ``attention``: of decode graphs; ``tiles``: where adapters are served.
    """

    attention: PlanBuffer | None
    tiles: TileBuffer | None


@dataclass(frozen=True, slots=True)
class Captured:
    """``run``: one graph, or pieces."""

    run: Graph | Pieces
    outputs: Outputs


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step laid out for the graph that it replays. ``context``: its attention, of pieces."""

    choice: Choice
    num_tokens: int
    context: ForwardContext | None


class CapturedForwards:
    """``graphs`` by key; a step whose key is absent runs eagerly."""

    def __init__(
        self,
        model: ServedModel,
        lora: LoraPools | None,
        device: GraphDevice,
        sizes: GraphSizes,
        inputs: StepInputs,
        max_model_len: int,
    ) -> None:
        """``inputs``: for as many tokens as a step may have."""
        self.model = model
        self.lora = lora
        self.device = device
        page_size = model.kv[0].k.shape[1]
        self.probe_len = min(page_size, max_model_len)
        """Tokens of a row that every model holds in one page."""
        planner = model.planner
        if not isinstance(planner, PagedPlanner):  # others lay a step out in tensors of its own
            sizes = GraphSizes((), sizes.tokens)
        self.sizes = sizes
        self.graphs: dict[GraphKey, Captured] = {}
        self.inputs = inputs
        layers = [m for m in model.module.model.modules() if isinstance(m, Attention)]
        like = torch.empty(0, dtype=model.module.place.dtype, device=model.module.place.device)
        self._buffers = AttentionBuffers(layers, max((1, *sizes.tokens)), like)
        self.tables: dict[tuple[Kind, int], Tables] = {}
        for size in sizes.rows:
            assert isinstance(planner, PagedPlanner)
            attention = planner.decode_buffer(size, -(-max_model_len // page_size))
            self.tables[Kind.DECODE, size] = Tables(attention, self._tiles(size))
        for size in sizes.tokens:
            self.tables[Kind.PIECES, size] = Tables(None, self._tiles(size))

    @property
    def with_deltas(self) -> bool:
        """Return whether there are graphs that launch deltas."""
        return any(tables.tiles is not None for tables in self.tables.values())

    def _tiles(self, size: int) -> TileBuffer | None:
        return None if self.lora is None else self.lora.decoder.weights.graph_tables(size)

    # ------------------------------------------------------------------ start

    def capture(self, key: GraphKey) -> Captured:
        """Record one forward, all of it padding. Its collectives are recorded, not run.

        Raises:
            RuntimeError: it does what cannot be captured.
        """
        self.clear(key)
        cutter = Cutter(self.device, self._buffers) if key.kind is Kind.PIECES else None
        try:
            with self.device.capturing(), self.deltas(key):
                self.device.begin()
                outputs = self._body(key, cutter)
                last = self.device.end()
        except BaseException:
            self.device.abandon()
            raise
        if cutter is None:
            return Captured(last, outputs)
        graphs = [*cutter.graphs, last]
        return Captured(Pieces(graphs, cutter.layers, self._buffers), outputs)

    def clear(self, key: GraphKey) -> None:
        """Nothing but padding in the tables that ``key`` reads."""
        tables = self.tables[key.kind, key.size]
        self.inputs.write(key.size, (), ())
        if tables.attention is not None:
            tables.attention.fill(())
        if tables.tiles is not None:
            tables.tiles.fill({})

    def run_eagerly(
        self, key: GraphKey, context: ForwardContext | None, num_tokens: int
    ) -> Outputs:
        """Return what the graph of ``key`` does, over the same tables, launched one by one.

        Collective.
        """
        through = None
        if key.kind is Kind.PIECES:
            through = Through(self._buffers, context, num_tokens)
        with self.deltas(key):
            return self._body(key, through)

    def deltas(self, key: GraphKey) -> AbstractContextManager[None]:
        """The deltas that a forward of ``key`` outside any step adds."""
        if self.lora is None:
            return nullcontext()
        tiles = self.tables[key.kind, key.size].tiles
        if key.variant is Variant.BASE or tiles is None:
            return self.lora.base_only()
        return self.lora.decoder.captured(tiles, key.size)

    @torch.inference_mode()
    def _body(self, key: GraphKey, breaks: Cutter | Through | None) -> Outputs:
        module, size = self.model.module, key.size
        tables = self.tables[key.kind, size]
        plan = None if tables.attention is None else tables.attention.plan
        context = ForwardContext(attn=plan, kv=self.model.kv, breaks=breaks)
        hidden = module(self.inputs.ids(size), self.inputs.positions(size), context)
        logits = module.compute_logits(hidden) if key.kind is Kind.DECODE else None
        return Outputs(hidden, logits)

    # ------------------------------------------------------------------ steps

    def plan(
        self, step: StepBatch, rows: Sequence[AttentionRow], *, eager: bool
    ) -> CapturedStep | None:
        """Lay a step out for its graph, with its deltas.

        None means that it runs eagerly, and nothing is laid out. ``eager``: only an eager forward
        can run it.
        """
        variant = Variant.BASE if self.lora is None else self.lora.decoder.variant(step)
        shape = StepShape(
            num_tokens=sum(row.num_tokens for row in step.rows),
            decodes=all(r.num_tokens == 1 and r.samples and not r.scored for r in step.rows),
            variant=variant,
            eager=eager,
        )
        choice = self.sizes.choose(shape)
        if choice is None or choice.key not in self.graphs:
            return None
        tables = self.tables[choice.key.kind, choice.key.size]
        if self.lora is not None:
            self.lora.plan(step, tables.tiles if variant is Variant.DELTAS else None)
        self._check(choice.key)
        context = None
        if tables.attention is None:
            context = self.model.plan(rows)
        else:
            tables.attention.fill(rows)
        return CapturedStep(choice, shape.num_tokens, context)

    def _check(self, key: GraphKey) -> None:
        """Check that the graph launches deltas exactly when the step has some.

        Raises LockstepError where it does not.
        """
        if self.lora is None:
            return
        if self.lora.decoder.deltas.current_plan().has_work != (key.variant is Variant.DELTAS):
            raise LockstepError(
                f"a step was to replay the graph {key}, but its adapter rows say otherwise"
            )

    @torch.inference_mode()
    def run(
        self,
        step: CapturedStep,
        ids: Sequence[int],
        positions: Sequence[int],
        heads: Sequence[int],
        sources: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """Return logits [len(heads), vocab_size] of these tokens on rank 0, None elsewhere.

        They stay until any graph is replayed. Collective.
        """
        self.inputs.write(step.choice.key.size, ids, positions, sources)
        outputs = self.replay(step)
        if step.choice.key.kind is Kind.PIECES:
            hidden = outputs.hidden[: step.num_tokens]
            return self.model.logits(hidden, heads) if heads else None
        assert len(heads) == step.num_tokens, "every row of a decode graph samples"
        return None if outputs.logits is None else outputs.logits[: step.num_tokens]

    def close(self) -> None:
        """Let every graph go; no step runs any more."""
        self.graphs.clear()

    def replay(self, step: CapturedStep) -> Outputs:
        """Launch the step's graph over its tables."""
        captured = self.graphs[step.choice.key]
        if isinstance(captured.run, Pieces):
            assert step.context is not None, "pieces attend eagerly"
            captured.run.replay(step.context, step.num_tokens)
        else:
            captured.run.replay()
        return captured.outputs
