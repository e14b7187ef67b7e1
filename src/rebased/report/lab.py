"""The page of `rebased report`: what a folder of runs shows, how sure one can be of it, and what is wrong with it."""

from collections import Counter
from collections.abc import Iterator

from rebased.report.cells import COUNTED, Results, build_results
from rebased.report.collect import Collection
from rebased.report.lab_figures import accuracy_by_width, mean_curves
from rebased.report.lab_tables import results_table, runs_table, width_table
from rebased.report.page import Page, Section, bullets, describe_origin, details, figure, paragraphs
from rebased.report.paper import deviations
from rebased.report.tables import Table


def lab_page(found: Collection, title: str) -> Page:
    results = build_results(found.runs)
    sections = [Section("In short", bullets(in_short(found, results)))]
    warnings = list(warn(found, results))
    if warnings:
        sections.append(Section("Mind", bullets(warnings)))
    sections += list(result_sections(results))
    sections.append(Section("Every run", details(f"{len(found.runs)} runs", runs_table(found.runs).to_html())))
    return Page(title, lead(found, results), sections, describe_origin(found.runs), embedded(found, results))


def lead(found: Collection, results: Results) -> str:
    seeds = sorted({run.seed for run in found.runs})
    return (
        f"{len(found.runs)} runs: {len(results.models)} model(s), {len(results.tasks)} task(s), {len(results.widths)} "
        f"width(s), {len({run.lr for run in found.runs})} learning rate(s), {len(seeds)} seed(s)."
    )


def in_short(found: Collection, results: Results) -> Iterator[str]:
    """A sentence a task: who recalls most, at the largest width that all models have."""
    for task in results.tasks:
        cells = results.of_task(task)
        best = max(cells, key=lambda cell: cell.test.mean)
        yield (
            f"{task}: {best.model} recalls most, {best.test.mean:.1%} of what it was asked at D = {best.d_model} "
            f"(lr {best.choice.lr:g}, {best.test.n} seed(s))."
        )


def warn(found: Collection, results: Results) -> Iterator[str]:
    """Everything that a reader must know before believing the rest."""
    codes = Counter(run.code for run in found.runs)
    if len(codes) > 1:
        versions = "; ".join(f"{code}: {count} runs" for code, count in codes.most_common())
        yield f"Runs of {len(codes)} versions of the code are mixed. A difference may be the code's. {versions}."
    if found.damaged_lines:
        where = ", ".join(found.damaged_files[:5]) + (", ..." if len(found.damaged_files) > 5 else "")
        yield f"{found.damaged_lines} damaged line(s) were skipped, in {where}: those epochs are missing here."
    if found.nameless:
        yield f"{found.nameless} record(s) without a readable first line were left out."
    if found.other:
        yield f"{found.other} record(s) of something else than MQAR were left out."
    if found.repeated:
        yield f"{found.repeated} run(s) are there more than once; the most complete record of each counts."
    if results.repeated:
        yield f"{results.repeated} run(s) differ from another in nothing that is learnt (such as the device): left out."
    for status, count in Counter(run.status for run in found.runs if run.status not in COUNTED).items():
        yield f"{count} run(s) are {status} and count in no result."
    diverged = [run for run in found.runs if run.status == "diverged"]
    if diverged:
        early = sum(not run.epochs for run in diverged)
        yield (
            f"{len(diverged)} run(s) diverged. Each counts with the best accuracy it had reached, as the paper's rule "
            f"has it; {early} of them with 0, before the end of a first epoch."
        )
    uneven = [cell for cell in results.cells if cell.choice.left_out]
    if uneven:
        yield f"In {len(uneven)} cell(s) some learning rates have fewer seeds than others and could not be chosen."


def result_sections(results: Results) -> Iterator[Section]:
    for i, task in enumerate(results.tasks):
        table = width_table(results, task).to_html()
        note = paper_note(results, task)
        picture = (
            figure(accuracy_by_width(results), "Mean over seeds; bars are the sample standard deviation.")
            if not i
            else ""
        )
        yield Section(f"Accuracy: {task}", picture + table + note)
    yield Section(
        "Learning curves",
        figure(
            mean_curves(results),
            "At each cell's chosen learning rate; the band is from the worst seed to the best. A run stops when it has "
            "solved the task.",
        ),
    )
    yield Section("Results in full", results_table(results).to_html())


def paper_note(results: Results, task: str) -> str:
    cells = [cell for cell in results.of_task(task) if cell.paper]
    if not cells:
        return ""
    differ = list(dict.fromkeys(text for cell in cells for text in deviations(cell.any_run)))
    how = f"These runs differ from the paper's: {'; '.join(differ)}." if differ else "Settings are the paper's."
    return paragraphs(f"The paper's values: Table 1 as printed, Figure 1 as read off the picture (±0.02). {how}")


def embedded(found: Collection, results: Results) -> dict[str, object]:
    """What the page was computed from, small enough to be in it."""
    return {
        "runs": [
            {
                "digest": run.digest,
                "folder": run.folder,
                "model": run.model,
                "config": run.settings,
                "status": run.status,
                "code": run.code,
                "device": run.device,
                "seconds": round(run.seconds, 2),
                "test": [round(value, 4) for value in run.accuracies],
            }
            for run in found.runs
        ],
    }


def lab_tables(found: Collection) -> dict[str, Table]:
    """By file name, what `--tables` writes."""
    results = build_results(found.runs)
    tables = {"results": results_table(results), "runs": runs_table(found.runs)}
    for i, task in enumerate(results.tasks, start=1):
        tables[f"by_width_{i}"] = width_table(results, task)
    return tables
