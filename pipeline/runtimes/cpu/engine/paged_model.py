"""A decoder on OpenVINO with a paged KV cache: `forward` computes one step for any mixture of sequences.

Reads the stateful model that `pipeline.runtimes.cpu.ir` writes (`openvino_model.xml`, `engine.json`), lets OpenVINO
turn its attention into PagedAttention, and gathers the rows whose logits are wanted before the vocabulary projection.
Written against OpenVINO 2026.4. It knows nothing of requests; each call says which blocks belong to which sequence.

OpenVINO and the oneDNN inside it compile kernels for each number of tokens in a step, and each keeps them in a cache of
its own (5,000 and 1,024 entries): 0.6 MiB a size for the checked-in target, 0.8 MiB for its draft. Without padding the
process grows with every new length of a prompt. So a step is padded to one of eight sizes between a power of two and
the next, 56 up to 512 tokens, and memory is bounded. Smaller caches would bound it too, but compile again and again.
"""

from __future__ import annotations

import ctypes
import json
import math
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
from .block_manager import BlockTable
from .capped_attention import cap_paged_attention, uncap_attention
from .processor import chosen_precision, integer_options, settle_memory
from .settings import EngineSettings
from .trimming import trim_outputs

LOGITS = ("logits", "logits.int8")  # outputs: as stored, and by an output projection in 8 bits
LONG = "rope.long"  # name of a constant of the graph: whether longrope's long factors hold
MODEL_FILE, WEIGHTS_FILE, FACTS_FILE = "openvino_model.xml", "openvino_model.bin", "engine.json"
_INPUTS = ("input_ids", "position_ids", "subsequence_begins", "logits_rows")
# Inputs that layers with a window have apart from the others, and their places at PagedAttention.
_PLACES = {"past_lens": 5, "block_indices": 7, "block_indices_begins": 8, "max_context_len": 12}
_KEY_CACHE, _VALUE_CACHE, _WINDOW = 3, 4, 10
STEP_TOKENS, SLOW_STEP_TOKENS = 512, 128  # of one step, where nobody asks for another number
SHORT_STEP = 32  # tokens of a step up to which the model for short steps is the faster one
INPUT_GROUP = 32  # numbers of an input that share a scale in it, as in llama.cpp's Q8_0


class StepFailed(RuntimeError):
    """OpenVINO could not compute a step."""


class TokenSlice(NamedTuple):
    """Contribution of one sequence to a step."""

    tokens: abc.Sequence[int]  # to be computed now
    past: int  # tokens before them, already in the cache
    tables: abc.Sequence[BlockTable]  # the sequence's blocks in each group, enough for past and tokens
    rows: int  # logits wanted: those after the last `rows` tokens
    adapter: int = 0  # number of the LoRA adapter, from 1; 0: the base


class _Step(NamedTuple):
    """A compiled model, and its inputs of a step."""

    request: ov.InferRequest
    inputs: Mapping[str, ov.Tensor]

    @classmethod
    def of(cls, compiled: ov.CompiledModel, names: abc.Iterable[str]) -> _Step:
        request = compiled.create_infer_request()
        return cls(request, {name: request.get_tensor(name) for name in names})


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
        self._weights = folder / WEIGHTS_FILE
        self.max_positions: int = facts["max_position_embeddings"]
        self.vocab_size: int = facts["vocab_size"]
        with signal_stack_kept():
            self.precision, self.reason = chosen_precision(settings.precision, gains=facts["bf16_pays"])
            self._kept: list[ov.Tensor] = []  # memory that the models point into
            self._stack = AdapterStack(adapters) if adapters else None
            slow = self.precision == "f32" and facts["bf16_pays"]
            # All sequences wait while a part of a prompt is computed.
            self.step_tokens = SLOW_STEP_TOKENS if slow else STEP_TOKENS
            # Where bf16 would be chosen if the processor had it.
            instead = slow and settings.precision == "auto"
            self.rounds: bool = facts["rounds_short_steps"] and (self.precision == "bf16" or instead)
            self._cache_type = "f16" if instead else self.precision
            if instead:
                projection = ", the output projection in 8 bits" if self.rounds else ""
                self.reason += f"; keys and values are held in f16{projection}"
            longest = min(self.max_positions, settings.max_sequence_tokens or self.max_positions)
            compiled, groups = self._compile(folder, facts, settings, longest)
            # Without bf16, one model is the better one for steps of any size.
            twice = self.rounds and self.precision == "bf16"
            short = self._compile(folder, facts, settings, longest, short=True)[0] if twice else None
        self._caches = {
            port.any_name: (port.element_type, [size.get_length() for size in list(port.partial_shape)[1:]])
            for port in compiled.inputs
            if port.any_name.startswith(("key_cache.", "value_cache."))
        }  # name -> (type, [kv_heads, block_size, head_dim])
        self.block_size: int = next(iter(self._caches.values()))[1][1]
        self.windows = tuple(groups)  # of each group of layers: tokens that are seen; None: all
        self._groups = tuple(groups.values())  # names of their caches
        names = [*_INPUTS, *(ADAPTER_INPUTS if self._stack else ())]
        names += [_name(name, group) for name in _PLACES for group in range(len(self._groups))]
        self._long = self._step = _Step.of(compiled, names)
        self._short = self._long if short is None else _Step.of(short, names)

    def _compile(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        settings: EngineSettings,
        longest: int,
        *,
        short: bool = False,
    ) -> tuple[ov.CompiledModel, dict[int | None, list[str]]]:
        """Compile the model for steps of any size, or for `short` ones; see `part_windows` for what else it returns.

        Args:
            longest: Tokens of the longest sequence.
        """
        core = ov.Core()
        model = core.read_model(folder / MODEL_FILE)
        for output in model.outputs[:]:
            if len(model.outputs) > 1 and output.any_name != LOGITS[self.rounds]:
                model.remove_result(output.get_node())
        if self.precision == "bf16":
            self._kept += trim_outputs(model, facts.get("padded", {}))
        if self._stack:
            self._stack.join(model, facts["linears"])
        # A sequence must not change its rotation as it grows, nor differ from those whose blocks it takes. So one
        # choice holds for all, as in TensorRT-LLM (RopeEmbeddingUtils, by max_seq_len).
        if facts.get("long_from") and longest > facts["long_from"]:
            turn_long(model)
        cap: float | None = facts.get("attention_cap")
        if cap is not None:
            uncap_attention(model)
        paged_attention_transformation(model)
        groups = part_windows(model, longest)
        if cap is not None:
            cap_paged_attention(model, cap)
        _gather_rows(model)
        _part_feed_forward(model)
        options = _properties(settings, self.precision, self._cache_type, integer_options(model))
        if self.rounds and (short or self.precision == "f32"):
            # OpenVINO leaves inputs as they are where the processor has no VNNI.
            options |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": str(INPUT_GROUP)}
        if short:
            attend_in_bf16(model)
            options |= {"INFERENCE_PRECISION_HINT": "f32"}
        return core.compile_model(model, "CPU", options), groups

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters; that of number 1 comes first."""
        return self._stack.names if self._stack else ()

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Size of one block of each group, keys and values of its layers."""
        sizes = {name: int(np.prod(shape)) * kind.size for name, (kind, shape) in self._caches.items()}
        return tuple(sum(sizes[name] for name in names) for names in self._groups)

    def allocate(self, num_blocks: abc.Sequence[int]) -> None:
        """Make the cache (of one block more in each group, for padding), and warm up."""
        self._spare = [BlockTable(np.array([count], np.int32)) for count in num_blocks]
        for count, names in zip(num_blocks, self._groups, strict=True):
            for name in names:
                kind, shape = self._caches[name]
                cache = ov.Tensor(kind, ov.Shape([count + 1, *shape]))
                cache.data[...] = 0  # attention reads whole blocks; what it masks must be finite
                for step in (self._long, self._short):
                    step.request.set_tensor(name, cache)
        tables = [BlockTable(np.zeros(2, np.int32)) for _ in self._groups]
        for length in (1, 2 * self.block_size):  # the first step of a kind is ten times as slow
            self.forward([TokenSlice([0] * length, 0, tables, 1)])
        settle_memory(self._weights)

    def forward(self, slices: abc.Sequence[TokenSlice]) -> npt.NDArray[np.float32]:
        """Logits [rows of all slices, vocab_size]; the array is overwritten by the next call."""
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        begins = [0]
        adapters: list[tuple[int, int]] = []
        slices = [*slices, *self._padding(sum(len(piece.tokens) for piece in slices))]
        for tokens, past, _, wanted, adapter in slices:
            adapters.append((adapter, len(tokens)))
            ids += tokens
            positions += range(past, past + len(tokens))
            begins.append(len(ids))
            rows += range(len(ids) - wanted, len(ids))
        self._step = self._short if len(ids) <= SHORT_STEP else self._long
        num_rows = len(rows)
        # never empty: OpenVINO wants a row to multiply
        rows += [0] * (_padded(max(1, num_rows)) - num_rows)
        self._set("input_ids", ids)
        self._set("position_ids", positions)
        self._set("subsequence_begins", begins)
        self._set("logits_rows", rows)
        for group in range(len(self._groups)):
            self._set_tables(group, slices)
        if self._stack:
            for name, array in zip(ADAPTER_INPUTS, self._stack.select(adapters), strict=True):
                self._step.inputs[name].shape = array.shape
                self._step.inputs[name].data[...] = array
        try:
            self._step.request.infer()
        except RuntimeError as error:
            raise StepFailed(f"OpenVINO failed on a step of {len(ids)} tokens: {error}") from error
        logits: npt.NDArray[np.float32] = self._step.request.get_output_tensor(0).data
        return logits.reshape(-1, self.vocab_size)[:num_rows]

    def _set_tables(self, group: int, slices: abc.Sequence[TokenSlice]) -> None:
        """Set the block tables of a group; its layers see only these blocks, as if sequences began there."""
        pasts: list[int] = []
        blocks: list[npt.NDArray[np.int32]] = []
        begins, longest = [0], 0
        for piece in slices:
            table = piece.tables[group]
            past = piece.past - table.first * self.block_size
            end = past + len(piece.tokens)
            count = -(-end // self.block_size)
            pasts.append(past)
            blocks.append(table.blocks[table.first : table.first + count])
            begins.append(begins[-1] + count)
            longest = max(longest, end)
        self._set(_name("past_lens", group), pasts)
        self._set(_name("block_indices", group), np.concatenate(blocks) if len(blocks) > 1 else blocks[0])
        self._set(_name("block_indices_begins", group), begins)
        self._step.inputs[_name("max_context_len", group)].data[...] = longest

    def _padding(self, num_tokens: int) -> Iterator[TokenSlice]:
        """Padding sequences, whose results are dropped, to fill up a step of `num_tokens`.

        All use the one spare block at once, which does no harm: they write the same keys and values there.
        """
        missing = _padded(num_tokens) - num_tokens
        for begin in range(0, missing, self.block_size):
            yield TokenSlice([0] * min(self.block_size, missing - begin), 0, self._spare, 0)

    def _set(self, name: str, values: list[int] | npt.NDArray[np.int32]) -> None:
        tensor = self._step.inputs[name]
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
    """Restore this thread's alternate stack for signal handlers after the block.

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
    """Rotate positions by the long factors of longrope."""
    for node in model.get_ops():
        if node.get_friendly_name() == LONG:
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(ops.constant(np.array(True)).output(0))


def part_windows(model: ov.Model, longest: int) -> dict[int | None, list[str]]:
    """Give layers with sliding windows their own block tables, with inputs for each window size.

    Returns:
        Window of each group, None for all tokens -> names of the caches of its layers.
    """
    groups: dict[int | None, list[ov.Node]] = {}
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            window = _product(node.input_value(_WINDOW).get_node())
            groups.setdefault(window if 0 < window < longest else None, []).append(node)
    for group, nodes in enumerate(groups.values()):
        for name, place in _PLACES.items() if group else ():
            shared = nodes[0].input_value(place)
            own = ops.parameter(shared.get_partial_shape(), shared.get_element_type(), _name(name, group))
            own.output(0).get_tensor().set_names({_name(name, group)})
            model.add_parameters([own])
            for node in nodes:
                node.input(place).replace_source_output(own.output(0))
    model.validate_nodes_and_infer_types()
    return {
        window: [node.input_value(at).get_any_name() for node in nodes for at in (_KEY_CACHE, _VALUE_CACHE)]
        for window, nodes in groups.items()
    }


def attend_in_bf16(model: ov.Model) -> None:
    """Let attention read and write a cache in bf16, whatever the rest of the model computes in."""
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            for place in range(3):  # query, key, value
                node.input(place).replace_source_output(
                    ops.convert(node.input_value(place), ov.Type.bf16).output(0)
                )
            targets = node.output(0).get_target_inputs()
            widened = ops.convert(node.output(0), ov.Type.f32)
            for target in targets:
                target.replace_source_output(widened.output(0))
    model.validate_nodes_and_infer_types()


def _product(node: ov.Node) -> int:
    """Value of a constant, or of converted constants that are multiplied, as the transformation writes windows."""
    if node.get_type_name() == "Constant":
        return int(node.data)
    if node.get_type_name() not in ("Convert", "Multiply"):
        raise ValueError(f"a window by {node.get_type_name()} is unknown to this engine")
    return math.prod(_product(source.get_node()) for source in node.input_values())


def _name(name: str, group: int) -> str:
    return f"{name}.{group}" if group else name


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


def _part_feed_forward(model: ov.Model) -> None:
    """Compute gates, up and down by three products, by giving SiLU a factor of 1.

    OpenVINO's joint kernel for bf16 (LLMMLP) wants f16 weights: it keeps a converted copy of ours beside the one that
    it packs, and is slower for prompts. For steps of one token, measurements disagree.
    """
    for node in model.get_ops():
        if node.get_type_name() == "Swish" and node.get_input_size() == 1:
            same = ops.swish(node.input_value(0), ops.constant(np.float32(1)))
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(same.output(0))
    model.validate_nodes_and_infer_types()


def _properties(
    settings: EngineSettings, precision: str, cache_type: str, further: Mapping[str, str]
) -> dict[str, Any]:
    return {
        **further,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": cache_type,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,  # pinned threads wait for each other when the machine has other work
        "INFERENCE_NUM_THREADS": settings.threads or 0,
    }
