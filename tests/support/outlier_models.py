"""A tiny decoder with activation outliers that do not affect its outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from tests.support.decoder_graphs import tiny_graph

LOUD = 40.0  # factor of the outlier channels
LOUD_CHANNELS = (3, 17)
NORM = "SimplifiedLayerNormalization"


def graph_with_outliers(path: Path) -> Path:
    """Scale up two channels of each norm except the last. Scale down the weights that read them."""
    model = onnx.load(tiny_graph(path))
    tables = {table.name: table for table in model.graph.initializer}
    loud = np.ones(tables["ones"].dims[0], np.float32)
    loud[list(LOUD_CHANNELS)] = LOUD
    for norm in [node for node in model.graph.node if node.op_type == NORM]:
        readers = [node for node in model.graph.node if norm.output[0] in node.input]
        if any(node.op_type != "MatMul" for node in readers):
            continue  # the last norm, before the head: a Slice reads it
        name = f"{norm.output[0]}_scale"
        model.graph.initializer.append(numpy_helper.from_array(loud, name))
        norm.input[1] = name
        for reader in readers:
            table = tables[reader.input[1]]
            quiet = numpy_helper.to_array(table) / loud[:, None]
            table.CopyFrom(numpy_helper.from_array(quiet, table.name))
    onnx.save(model, path)
    return path
