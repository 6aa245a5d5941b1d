"""`export --format onnx`: the model as an ONNX graph, checked against PyTorch by onnxruntime.

Numbers: the interface is float32 whatever `dtype` is. `bf16` and `fp16` store the weights so and
widen them when the file is loaded: onnxruntime's CPU kernels have neither type, so computing is
float32. `int8` quantises matrix products with weights (per column where the weight is a matrix, per
tensor for the persistent vectors of a layer) and their inputs anew in every call, and embeddings.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allattn.config import UnavailableError
from allattn.inference.numbers import DTYPES
from allattn.inference.programs import Call, Program, trace

MODEL_FILE = "model.onnx"
NEEDED = ("onnx", "onnxscript", "onnxruntime")
_SMALL = 1024  # tensors of fewer numbers (biases, norms) stay float32
_ONE_FILE = 2_000_000_000  # bytes; protobuf holds no larger message


def need_onnx() -> None:
    """Refuse in one line where the extra is not installed.

    Raises:
        ValueError: naming what is missing.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UnavailableError(
            "format", f"onnx needs {', '.join(missing)}; pip install 'allattn[onnx]'"
        )


def need_onnxruntime() -> None:
    """Refuse in one line where what runs a graph is not installed.

    Raises:
        ValueError: saying how to get it.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise ValueError("a model.onnx is run by onnxruntime; pip install onnxruntime")


def to_onnx(program: Program) -> Any:
    """The program as an ONNX graph (`onnx.ModelProto`), with the names of `Program.state_names`.

    Raises:
        ValueError: an operation that ONNX does not have, or a model of more than 2 GB.
    """
    size = sum(t.numel() * 4 for t in program.state_dict().values())
    if size > _ONE_FILE:
        raise ValueError(f"{size / 1e9:.1f} GB of float32 weights do not fit one ONNX file (2 GB)")
    names = program.state_names()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        try:
            exported = torch.onnx.export(
                trace(program),
                dynamo=True,
                input_names=["ids", "wanted", *names],
                output_names=["log_probs", *(f"next_{name}" for name in names)],
                opset_version=18,
                optimize=True,  # not the default before PyTorch 2.7
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise ValueError(f"--format onnx: cannot be expressed ({error})") from error
    assert exported is not None, "dynamo gives a program"
    return exported.model_proto


def store_as(proto: Any, dtype: str) -> None:
    """Store a graph's large float32 tensors in bf16 or fp16, widened when it is loaded."""
    import onnx
    from onnx import numpy_helper

    code = {"bf16": onnx.TensorProto.BFLOAT16, "fp16": onnx.TensorProto.FLOAT16}[dtype]
    casts = []
    for tensor in proto.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        values = torch.from_numpy(numpy_helper.to_array(tensor).copy())
        if values.numel() < _SMALL:
            continue
        name, stored = tensor.name, values.to(DTYPES[dtype]).view(torch.int16).numpy()
        tensor.CopyFrom(
            onnx.TensorProto(
                name=f"{name}_{dtype}", data_type=code, dims=stored.shape, raw_data=stored.tobytes()
            )
        )
        casts.append(onnx.helper.make_node("Cast", [tensor.name], [name], to=1))
    nodes = [*casts, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def round_program(program: Program, dtype: str) -> None:
    """The same rounding in PyTorch, to compare with: of what `store_as` rounds, in float32."""
    for tensor in program.state_dict().values():
        if tensor.numel() >= _SMALL:
            tensor.copy_(tensor.to(DTYPES[dtype]).float())


def quantise(plain: Path, out: Path) -> None:
    """From a float32 file to one with dynamic int8."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    proto = onnx.load(plain)
    _without_gemm(proto)
    ranks = {tensor.name: len(tensor.dims) for tensor in proto.graph.initializer}
    stacks = [
        n.name for n in proto.graph.node if n.op_type == "MatMul" and ranks.get(n.input[1], 2) > 2
    ]
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)  # its advice is for graphs of another kind
    try:
        half = plain.with_suffix(".half.onnx")
        onnx.save(proto, half)
        common: dict[str, Any] = {"weight_type": QuantType.QInt8}
        quantize_dynamic(half, half, nodes_to_exclude=stacks, per_channel=True, **common)
        quantize_dynamic(half, out, nodes_to_quantize=stacks, **common)
    finally:
        logging.getLogger().setLevel(level)
    half.unlink()


def _without_gemm(proto: Any) -> None:
    """Turn Gemm into MatMul and Add, with a transposed weight of its own.

    quantize_dynamic does so too, but older ones transpose the weight where it is: that of tied
    embeddings has another user.
    """
    from onnx import helper, numpy_helper

    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    nodes = []
    for node in proto.graph.node:
        if node.op_type != "Gemm":
            nodes.append(node)
            continue
        given = {
            attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute
        }
        assert given.get("transB") == 1 and not given.get("transA"), given
        assert given.get("alpha", 1.0) == given.get("beta", 1.0) == 1.0, given
        x, weight, bias = node.input
        name, product = f"{node.name}_weight", f"{node.name}_product"
        values = numpy_helper.to_array(weights[weight]).T.copy()
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
        nodes.append(helper.make_node("MatMul", [x, name], [product], f"{node.name}_matmul"))
        nodes.append(helper.make_node("Add", [product, bias], node.output, f"{node.name}_add"))
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in used]
    del proto.graph.node[:], proto.graph.initializer[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(kept)


def session_call(path: Path) -> Call:
    """A file as a function of tensors, run by onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def call(ids: Tensor, wanted: Tensor, state: list[Tensor]) -> list[Tensor]:
        values = (value.numpy() for value in (ids, wanted, *state))
        outputs = session.run(None, dict(zip(names, values, strict=True)))
        return [torch.from_numpy(value) for value in outputs]

    return call
