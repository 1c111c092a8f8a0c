"""Tensors of a Triton request as numpy arrays, and back. The only shared module that needs Triton's Python backend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from shared.refusal import RequestRefused

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
Array = npt.NDArray[Any]


def read(request: Any, name: str) -> Array | None:
    """The input of that name; None if the request has none."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def required(request: Any, name: str, also: str = "") -> Array:
    """The input of that name. Triton counts inputs only: where an optional one is given, it does not miss another.

    `also`: what a client may know the input by.

    Raises:
        RequestRefused: The request has none.
    """
    array = read(request, name)
    if array is None:
        raise RequestRefused(f"{name}{f' ({also})' if also else ''}: is missing")
    return array


def read_texts(request: Any, name: str) -> list[list[str]] | None:
    """A text input as rows of texts.

    Raises:
        RequestRefused: It is not UTF-8.
    """
    array = read(request, name)
    if array is None:
        return None
    try:
        return [[item.decode("utf-8") for item in row] for row in array.reshape(array.shape[0], -1).tolist()]
    except UnicodeDecodeError as error:
        raise RequestRefused(f"{name}: is not UTF-8 ({error.reason} at byte {error.start})") from None


def read_ids(request: Any, name: str) -> list[list[int]] | None:
    """An input of token ids as rows of ids; None if the request has none."""
    array = read(request, name)
    return None if array is None else array.reshape(array.shape[0], -1).tolist()


def read_flag(request: Any, name: str, default: bool = False) -> bool:
    """A boolean input. In a batch, the first row's."""
    array = read(request, name)
    return default if array is None or array.size == 0 else bool(array.reshape(-1)[0])


def response(**outputs: Array) -> Any:
    """A response that holds the given outputs."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def texts(values: Iterable[str]) -> Array:
    """Texts as a TYPE_STRING tensor of one dimension, with a batch, too: upstream sends them so, and its clients read
    `output[0]`."""
    return np.array([text.encode("utf-8") for text in values], np.object_)


def failure(error: Exception) -> Any:
    """A response that holds an error of one line: the request's fault if it was refused, ours otherwise."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RequestRefused):
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
        )
    message = f"{type(error).__name__}: {message}"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL))
