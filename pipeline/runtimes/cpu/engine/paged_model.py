"""A decoder on OpenVINO with a paged KV cache: `forward` computes one step for any mixture of sequences.

Reads the stateful model that `pipeline.runtimes.cpu.ir` writes (`openvino_model.xml`, `engine.json`), lets OpenVINO
turn its attention into PagedAttention, and gathers the rows whose logits are wanted before the vocabulary projection.
Written against OpenVINO 2026.4. It knows nothing of requests; which block belongs to whom is told with each call.

OpenVINO and the oneDNN inside it compile kernels for each number of tokens in a step, and each keeps them in a cache of
its own (5,000 and 1,024 entries): 0.6 MiB a size for the checked-in target, 0.8 MiB for its draft. Without padding the
process grows with every new length of a prompt. So a step is padded to one of eight sizes between a power of two and
the next, 56 up to 512 tokens, and memory is bounded. Smaller caches would bound it too, but compile again and again.
"""

from __future__ import annotations

import ctypes
import json
from collections import abc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops
from openvino._offline_transformations import paged_attention_transformation

from .adapters import ADAPTER_INPUTS, AdapterStack
from .capped_attention import cap_paged_attention, uncap_attention
from .processor import chosen_precision, integer_options
from .settings import EngineSettings

LONG = "rope.long"  # name of a constant of the graph: whether longrope's long factors hold
MODEL_FILE, FACTS_FILE = "openvino_model.xml", "engine.json"
_INPUTS = (
    "input_ids", "position_ids", "past_lens", "subsequence_begins",
    "block_indices_begins", "block_indices", "max_context_len", "logits_rows",
)  # fmt: skip


class StepFailed(RuntimeError):
    """OpenVINO could not compute a step."""


class TokenSlice(NamedTuple):
    """Contribution of one sequence to a step."""

    tokens: abc.Sequence[int]  # to be computed now
    past: int  # tokens before them, already in the cache
    table: npt.NDArray[np.int32]  # the sequence's blocks, enough for past and tokens
    rows: int  # logits wanted: those after the last `rows` tokens
    adapter: int = 0  # number of the LoRA adapter, from 1; 0: the base


class PagedModel:
    def __init__(self, folder: Path, settings: EngineSettings, adapters: Path | None = None) -> None:
        """Load a model.

        Args:
            folder: See `MODEL_FILE` and `FACTS_FILE`.
            settings: Precision and threads.
            adapters: File of LoRA adapters (`adapters.AdapterStack`).

        Raises:
            UnfitProcessor: This machine has no arithmetic of the precision that is asked for.
        """
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        self.max_positions: int = facts["max_position_embeddings"]
        self.vocab_size: int = facts["vocab_size"]
        with signal_stack_kept():
            self.precision, self.reason = chosen_precision(settings.precision, gains=facts["bf16_pays"])
            core = ov.Core()
            model = core.read_model(folder / MODEL_FILE)
            self._stack = AdapterStack(adapters) if adapters else None
            if self._stack:
                self._stack.join(model, facts["linears"])
            # A sequence must not change its rotation as it grows, nor differ from those whose blocks it takes. So one
            # choice holds for all, as in TensorRT-LLM (RopeEmbeddingUtils, by max_seq_len).
            longest = min(self.max_positions, settings.max_sequence_tokens or self.max_positions)
            if facts.get("long_from") and longest > facts["long_from"]:
                turn_long(model)
            cap: float | None = facts.get("attention_cap")
            if cap is not None:
                uncap_attention(model)
            paged_attention_transformation(model)
            if cap is not None:
                cap_paged_attention(model, cap)
            _gather_rows(model)
            compiled = core.compile_model(
                model, "CPU", _properties(settings, self.precision, integer_options(model))
            )
        self._caches = {
            port.any_name: (port.element_type, [size.get_length() for size in list(port.partial_shape)[1:]])
            for port in compiled.inputs
            if port.any_name.startswith(("key_cache.", "value_cache."))
        }  # name -> (type, [kv_heads, block_size, head_dim])
        self.block_size: int = next(iter(self._caches.values()))[1][1]
        self._request = compiled.create_infer_request()
        names = (*_INPUTS, *(ADAPTER_INPUTS if self._stack else ()))
        self._inputs = {name: self._request.get_tensor(name) for name in names}

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters; that of number 1 comes first."""
        return self._stack.names if self._stack else ()

    @property
    def block_bytes(self) -> int:
        """Size of one block, keys and values of all layers."""
        return sum(int(np.prod(shape)) * kind.size for kind, shape in self._caches.values())

    def allocate(self, num_blocks: int) -> None:
        """Make the cache (of one block more, for padding), and warm up."""
        self._spare = np.array([num_blocks], np.int32)
        for name, (kind, shape) in self._caches.items():
            cache = ov.Tensor(kind, ov.Shape([num_blocks + 1, *shape]))
            cache.data[...] = 0  # attention reads whole blocks; what it masks must be finite
            self._request.set_tensor(name, cache)
        for length in (1, 2 * self.block_size):  # the first step of a kind is ten times as slow
            self.forward([TokenSlice([0] * length, 0, np.zeros(2, np.int32), 1)])

    def forward(self, slices: abc.Sequence[TokenSlice]) -> npt.NDArray[np.float32]:
        """Logits [rows of all slices, vocab_size]; the array is overwritten by the next call."""
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        begins, block_begins = [0], [0]
        tables: list[npt.NDArray[np.int32]] = []
        adapters: list[tuple[int, int]] = []
        longest = 0
        slices = [*slices, *self._padding(sum(len(piece.tokens) for piece in slices))]
        for tokens, past, table, wanted, adapter in slices:
            adapters.append((adapter, len(tokens)))
            end = past + len(tokens)
            blocks = -(-end // self.block_size)
            ids += tokens
            positions += range(past, end)
            begins.append(len(ids))
            rows += range(len(ids) - wanted, len(ids))
            tables.append(table[:blocks])
            block_begins.append(block_begins[-1] + blocks)
            longest = max(longest, end)
        num_rows = len(rows)
        # never empty: OpenVINO wants a row to multiply
        rows += [0] * (_padded(max(1, num_rows)) - num_rows)
        self._set("input_ids", ids)
        self._set("position_ids", positions)
        self._set("past_lens", [piece.past for piece in slices])
        self._set("subsequence_begins", begins)
        self._set("block_indices_begins", block_begins)
        self._set("block_indices", np.concatenate(tables) if len(tables) > 1 else tables[0])
        self._set("logits_rows", rows)
        self._inputs["max_context_len"].data[...] = longest
        if self._stack:
            for name, array in zip(ADAPTER_INPUTS, self._stack.select(adapters), strict=True):
                self._inputs[name].shape = array.shape
                self._inputs[name].data[...] = array
        try:
            self._request.infer()
        except RuntimeError as error:
            raise StepFailed(f"OpenVINO failed on a step of {len(ids)} tokens: {error}") from error
        logits: npt.NDArray[np.float32] = self._request.get_output_tensor(0).data
        return logits.reshape(-1, self.vocab_size)[:num_rows]

    def _padding(self, num_tokens: int) -> Iterator[TokenSlice]:
        """Sequences whose results are thrown away, to fill up a step of `num_tokens`.

        All use the one spare block at once, which does no harm: they write the same keys and values there.
        """
        missing = _padded(num_tokens) - num_tokens
        for begin in range(0, missing, self.block_size):
            yield TokenSlice([0] * min(self.block_size, missing - begin), 0, self._spare, 0)

    def _set(self, name: str, values: list[int] | npt.NDArray[np.int32]) -> None:
        tensor = self._inputs[name]
        tensor.shape = [len(values)]
        tensor.data[:] = values


def _padded(count: int) -> int:
    """`count` rounded up to four significant bits, which is less than an eighth more.

    >>> [_padded(count) for count in (1, 15, 16, 17, 33, 400, 512)]
    [1, 15, 16, 18, 36, 416, 512]
    """
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


class _SignalStack(ctypes.Structure):
    """`stack_t` of sigaltstack(2)."""

    _fields_ = [("ss_sp", ctypes.c_void_p), ("ss_flags", ctypes.c_int), ("ss_size", ctypes.c_size_t)]


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """This thread's alternate stack for signal handlers is the same afterwards as before.

    OpenVINO's CPU plugin sets one of its own and frees it with the last model, but takes it back only if models go in
    the reverse of the order in which they came. Otherwise the next signal that Python handles is a segmentation fault.
    """
    libc, before = ctypes.CDLL(None), _SignalStack()
    libc.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(before), None)


def turn_long(model: ov.Model) -> None:
    """Let positions turn by the long factors of longrope."""
    for node in model.get_ops():
        if node.get_friendly_name() == LONG:
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(ops.constant(np.array(True)).output(0))


def _gather_rows(model: ov.Model) -> None:
    """Add the input `logits_rows`, and compute logits for these rows only."""
    projection = model.output(0).get_node()
    while projection.get_type_name() != "MatMul":
        projection = projection.input_value(0).get_node()
    rows = ops.parameter(ov.PartialShape([-1]), ov.Type.i32, name="logits_rows")
    rows.output(0).get_tensor().set_names({"logits_rows"})
    hidden = projection.input_value(0)  # [tokens, 1, hidden]
    projection.input(0).replace_source_output(ops.gather(hidden, rows, ops.constant(0)).output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


def _properties(settings: EngineSettings, precision: str, further: Mapping[str, str]) -> dict[str, Any]:
    return {
        **further,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # pinned threads wait for each other when the machine has other work
        "INFERENCE_NUM_THREADS": settings.threads or 0,
    }
