"""Pictures of what was predicted or measured."""

import importlib.util
import io
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ._files import write_whole


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ._benchmark import Row
    from ._predicting import Report, Row as PredictRow
    from ._published import Comparison


def check_plotting(file: str) -> None:
    """Before any work begins: whether a picture can be made, of the kind that the suffix says."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException(
            "--plot needs matplotlib: pip install 'pallas-ops[plots]', or leave --plot out."
        )
    path = pathlib.Path(file)
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

    rows = [row for row in found.rows if row.tflops is not None]
    figure, (roof, tiles) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    note = "" if found.calibrated else ", UNCALIBRATED"
    title = f"predicted from schedules of {found.libtpu}{note}"
    if found.no_compiler is not None:
        title = "no TPU compiler: nothing is predicted"
    figure.suptitle(f"{found.problem.describe()}\n{title}")
    _plot_roofline(found, rows, roof)
    _plot_map(rows, tiles)
    _save(figure, file)


def _plot_roofline(found: "Report", rows: "Sequence[PredictRow]", roof: "Axes") -> None:
    import numpy as np

    from ..compiler import chip, peak_operations_per_second

    problem = found.problem
    assert problem.device is not None
    on = chip(problem.device)
    least = problem.matmul.flops / problem.matmul.bytes_accessed
    peak = problem.matmul.flops / found.roofline_seconds / 1e12
    top = peak_operations_per_second(problem.matmul, on) / 1e12
    intensities = np.geomspace(max(least / 100, 0.1), least * 4, 200)
    roofline = np.minimum(top, intensities * on.bytes_per_second / 1e12)
    roof.loglog(intensities, roofline, color="black", label=f"{problem.device}: {top:.0f} TFLOP/s")
    placed = [
        (row.flops / row.hbm_bytes, row.tflops) for row in rows if row.hbm_bytes and row.tflops
    ]
    if placed:
        roof.scatter(*zip(*placed, strict=True), label="tiles, predicted")
    roof.scatter([least], [peak], marker="*", s=120, label="this product at the roofline")
    if found.xla is not None:
        xla = problem.matmul.flops / found.xla.seconds / 1e12
        roof.scatter([least], [xla], marker="x", label="XLA's own dot, predicted")
    roof.set(xlabel="operations for each byte of HBM", ylabel="TFLOP/s")
    roof.legend()


def _plot_map(rows: "Sequence[PredictRow]", tiles: "Axes") -> None:
    import numpy as np

    if not rows:
        tiles.set_axis_off()
        tiles.text(0.5, 0.5, "no tile has a predicted time", ha="center", va="center")
        return
    ms = sorted({row.blocks[0] for row in rows})
    ns = sorted({row.blocks[2] for row in rows})
    best = np.full((len(ms), len(ns)), np.nan)
    for row in rows:
        place = ms.index(row.blocks[0]), ns.index(row.blocks[2])
        if row.tflops is not None:
            best[place] = np.nanmax([best[place], row.tflops])
    # The colours of one rate alone need another limit.
    least = 0 if np.nanmin(best) == np.nanmax(best) else None
    image = tiles.imshow(best, aspect="auto", origin="lower", vmin=least)
    tiles.set(xlabel="block_n", ylabel="block_m", title="TFLOP/s with the best block_k")
    tiles.set_xticks(range(len(ns)), list(map(str, ns)))
    tiles.set_yticks(range(len(ms)), list(map(str, ms)))
    for (i, j), value in np.ndenumerate(best):
        if not np.isnan(value):
            color = _readable_on(tuple(image.to_rgba(value)))
            tiles.text(j, i, f"{value:.0f}", ha="center", va="center", color=color)
    tiles.figure.colorbar(image, ax=tiles)


def _readable_on(background: "tuple[float, ...]") -> str:
    """Black or white, whichever has more contrast with a background: WCAG's relative luminance."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in background[:3]
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if luminance > 0.179 else "white"


def _save(figure: "Figure", file: str) -> None:
    import matplotlib.pyplot as plt

    picture = io.BytesIO()
    figure.savefig(picture, format=pathlib.Path(file).suffix.removeprefix(".").lower())
    plt.close(figure)
    write_whole(pathlib.Path(file), picture.getvalue())


def plot_rows(rows: "Sequence[Row]", device: str, file: str) -> None:
    """TFLOP/s of each provider: a panel for each product, a group of bars for each shape."""
    import matplotlib.pyplot as plt
    import numpy as np

    from ._benchmark import PROVIDERS

    products = list(dict.fromkeys((row.product, row.dtype) for row in rows))
    shapes = list(dict.fromkeys((row.m, row.k, row.n) for row in rows))
    width = max(8.0, 0.35 * len(shapes))
    figure, panels = plt.subplots(
        len(products), 1, figsize=(width, 3.5 * len(products)), squeeze=False, layout="constrained"
    )
    kinds = " and ".join(sorted({row.kind for row in rows}))
    note = "" if all(row.calibrated for row in rows) else ", UNCALIBRATED"
    figure.suptitle(f"{device}, {kinds}{note}")
    for panel, (product, dtype) in zip(panels[:, 0], products, strict=True):
        for offset, provider in enumerate((*PROVIDERS, "roofline")):
            own = {
                (row.m, row.k, row.n): row
                for row in rows
                if (row.product, row.dtype) == (product, dtype)
                and row.provider == ("tuned" if provider == "roofline" else provider)
            }
            places = np.arange(len(shapes))
            if provider == "roofline":
                heights = [own[s].flops / own[s].roofline_seconds / 1e12 for s in shapes]
                panel.plot(places, heights, "k_", markersize=12, label=provider)
            else:
                tflops = [own[shape].tflops or 0.0 for shape in shapes]
                panel.bar(places + (offset - 1) * 0.27, tflops, 0.25, label=provider)
        panel.set(title=f"{product}, {dtype}", ylabel="TFLOP/s")
        names = ["x".join(map(str, shape)) for shape in shapes]
        panel.set_xticks(range(len(shapes)), names, rotation=90, fontsize=7)
    # Beside all bars, and not over those of one shape.
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    _save(figure, file)


def plot_published(found: "Comparison", file: str) -> None:
    """The tutorial's figure again: its measurements, the prediction, and what dispatch takes."""
    import matplotlib.pyplot as plt

    from ..compiler import chip, peak_operations_per_second

    ours = found.fits[0]
    tutorial = "bielik-on-tpu, episode 2"
    figure, (times, rates) = plt.subplots(1, 2, figsize=(12, 6), layout="constrained")
    for blocks, name, color in (((128, 128, 128), "tiles of 128", "C0"), (None, "XLA", "C1")):
        own = [
            (row.problem.m, row.wall_seconds, ours.predicted[index], row.problem.flops)
            for index, row in enumerate(found.rows)
            if row.source == tutorial and row.blocks == blocks
        ]
        sizes = [size for size, *_ in own]
        dispatch = ours.dispatch[tutorial]
        series = (
            ("published, wall clock", [wall for _, wall, _, _ in own], "o-"),
            ("predicted + dispatch", [p + dispatch for _, _, p, _ in own], "x--"),
            ("predicted, the product alone", [p for _, _, p, _ in own], ":"),
        )
        for label, seconds, style in series:
            flops = [count for *_, count in own]
            times.loglog(sizes, [s * 1e3 for s in seconds], style, color=color)
            tflops = [count / s / 1e12 for count, s in zip(flops, seconds, strict=True)]
            rates.plot(sizes, tflops, style, color=color, label=f"{name}: {label}")
    times.axhline(ours.dispatch[tutorial] * 1e3, color="grey", linewidth=1)
    times.text(4096, ours.dispatch[tutorial] * 1e3, "dispatch, fitted", va="top", ha="right")
    times.set(xlabel="m = k = n", ylabel="ms of one call")
    peak = peak_operations_per_second(found.rows[0].problem, chip("v5e")) / 1e12
    rates.axhline(peak, color="black", linewidth=1)
    rates.set(xlabel="m = k = n", ylabel="TFLOP/s")
    for panel in (times, rates):
        panel.set_xscale("log", base=2)
    # Beside all lines, and not over one.
    figure.legend(loc="outside lower center", ncols=2)
    figure.suptitle(f"{tutorial}, on a v5e; predicted beside what it measured")
    _save(figure, file)
