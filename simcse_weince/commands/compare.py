"""``simcse-weince compare``."""

import sys
from collections.abc import Sequence

from simcse_weince.commands.shared_options import CommandParser, check_output, check_outputs
from simcse_weince.errors import InputError


def run(arguments: Sequence[str]) -> None:
    """Lay training runs beside one another: print the scores, write the page."""
    parser = CommandParser(prog="simcse-weince compare", description="Compare training runs on one page.")
    parser.add_argument("runs", metavar="RUN_DIR", nargs="*", help="the --output_dir of a finished training")
    parser.add_argument("--report", metavar="FILE.html", help="write the page, with learning curves and statistics")
    parser.add_argument("--study", metavar="DIR", help="instead: the records of a study, over seeds with intervals")
    parser.add_argument("--output", metavar="FILE.json", help="with --study: write every figure")
    options = parser.parse(arguments)
    if bool(options.runs) == bool(options.study) or (options.output and not options.study):
        raise InputError("give either RUN_DIRs or --study DIR; --output goes with --study")
    if options.study:
        _compare_study(options.study, options.report, options.output)
        return
    check_output(options.report, "--report", options.runs)

    from simcse_weince.extremes.runs import build_comparison, differences, read_runs, scores

    runs = read_runs(options.runs)
    table = [["", *(run.name for run in runs)], *scores(runs), *differences(runs)]
    cells = [
        [f"{cell:.4f}" if isinstance(cell, float) else str("-" if cell is None else cell) for cell in row]
        for row in table
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        sys.stdout.write("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
    if options.report:
        build_comparison(runs).write(options.report)


def _compare_study(folder: str, report: str | None, output: str | None) -> None:
    """Print the tables of a study as Markdown, write them as a page and as JSON."""
    from simcse_weince.outputs import write_json
    from simcse_weince.study.plan import read_study
    from simcse_weince.study.report import summarize, to_markdown, write_page

    study = read_study(folder)
    check_outputs({"--report": report, "--output": output}, [folder, str(study.output_dir)])
    summary = summarize(study)
    sys.stdout.write(to_markdown(summary))
    if report:
        write_page(summary, report)
    if output:
        write_json(output, summary)
