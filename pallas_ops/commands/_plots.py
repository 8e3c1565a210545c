"""Pictures of what was predicted or measured."""

import importlib.util
import pathlib
from typing import TYPE_CHECKING

import click


if TYPE_CHECKING:
    from ._predicting import Report


def check_plotting(file: str) -> None:
    """Before any work begins: whether a picture can be made and written there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException(
            "--plot needs matplotlib: pip install 'pallas-ops[plots]', or leave --plot out."
        )
    path = pathlib.Path(file)
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"{path.parent} is no folder.", param_hint="--plot")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise click.BadParameter(
            f"{file!r} has no suffix that matplotlib knows; known are {', '.join(kinds)}.",
            param_hint="--plot",
        )


def plot_report(found: "Report", file: str) -> None:
    """A roofline with each tile on it, and a map of the best time for each pair of blocks."""
    import matplotlib.pyplot as plt
    import numpy as np

    from ..compiler import chip

    problem = found.problem
    assert problem.device is not None
    on = chip(problem.device)
    rows = [row for row in found.rows if row.tflops is not None and row.hbm_bytes]
    figure, (roof, tiles) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    note = "" if found.calibrated else ", UNCALIBRATED"
    figure.suptitle(f"{problem.describe()}\npredicted from schedules of {found.libtpu}{note}")

    least = problem.matmul.flops / problem.matmul.bytes_accessed
    peak = problem.matmul.flops / found.roofline_seconds / 1e12
    from ..compiler._judge import peak_operations_per_second

    top = peak_operations_per_second(problem.matmul, on) / 1e12
    intensities = np.geomspace(max(least / 100, 0.1), least * 4, 200)
    roofline = np.minimum(top, intensities * on.bytes_per_second / 1e12)
    roof.loglog(intensities, roofline, color="black", label=f"{problem.device}: {top:.0f} TFLOP/s")
    roof.scatter(
        [row.flops / row.hbm_bytes for row in rows if row.hbm_bytes],
        [row.tflops for row in rows if row.tflops],
        label="tiles, predicted",
    )
    roof.scatter([least], [peak], marker="*", s=120, label="this product at the roofline")
    if found.xla_seconds is not None:
        xla = problem.matmul.flops / found.xla_seconds / 1e12
        roof.scatter([least], [xla], marker="x", label="XLA's own estimate")
    roof.set(xlabel="operations for each byte of HBM", ylabel="TFLOP/s")
    roof.legend()

    ms = sorted({row.blocks[0] for row in rows})
    ns = sorted({row.blocks[2] for row in rows})
    best = np.full((len(ms), len(ns)), np.nan)
    for row in rows:
        place = ms.index(row.blocks[0]), ns.index(row.blocks[2])
        if row.tflops is not None:
            best[place] = np.nanmax([best[place], row.tflops])
    image = tiles.imshow(best, aspect="auto", origin="lower")
    tiles.set(xlabel="block_n", ylabel="block_m", title="TFLOP/s with the best block_k")
    tiles.set_xticks(range(len(ns)), list(map(str, ns)))
    tiles.set_yticks(range(len(ms)), list(map(str, ms)))
    for (i, j), value in np.ndenumerate(best):
        if not np.isnan(value):
            tiles.text(j, i, f"{value:.0f}", ha="center", va="center", color="white")
    if rows:
        figure.colorbar(image, ax=tiles)
    try:
        figure.savefig(file)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}.") from None
    plt.close(figure)
