"""Tables of measurements, comparisons and assessments for the page, terminal and notebooks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from sinklab.assessing.assess_model import Assessment, JudgedSetting
from sinklab.assessing.part import SAFE
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.statistics.details import Details
from sinklab.measuring.statistics.secondary import FIRST_FEW, SecondarySink, first_of_each
from sinklab.measuring.statistics.statistic_base import OfAngles
from sinklab.models.families import ranges_text
from sinklab.report.data import ReportData, rates_by_eps
from sinklab.survey.suites import ComparedQuantity
from sinklab.tables import (
    NOTHING,
    SINK_1,
    Table,
    TableCell,
    TableColumn,
    Value,
    names,
    numbers,
    plural,
)

POSITIONS = 6  # number of first positions with a row of their own in the table of a measurement
SHOWN_SINKS = 3  # maximum number of secondary sinks shown at positions 2 to 4, and likewise at later positions
Labelled = Sequence[tuple[str, Measurement]]
"""Pairs of label and measurement; the label of a single measurement may be empty."""


def suite_tables(data: ReportData) -> list[Table]:
    """Make the report's tables of model comparisons, ablations, and propositions on repeated tokens."""
    compared = [
        replace(comparison_table(suite.document.rows, list(suite.document.models)), key=f"comparison-{number}")
        for number, suite in enumerate(data.suites)
        if suite.document.models
    ]
    measured = [(data.label(run), one) for run, one in data.measured]
    return [*compared, *filter(None, (ablations_table(measured), propositions_table(measured)))]


def comparison_table(rows: Iterable[ComparedQuantity], models: Sequence[str]) -> Table:
    """Make a table with a row per quantity: its value for each model, and the differences from the first model."""
    first, *others = models
    columns = [TableColumn("Quantity", text=True), TableColumn(first, "first model", ".3f")]
    for model in others:
        columns += [TableColumn(model, form=".3f"), TableColumn("Difference", f"from {first}", "+.3f")]
    lines: list[list[Value]] = []
    for row in rows:
        values = row.values | dict.fromkeys(row.infinite, float("inf"))
        line: list[Value] = [f"{row.quantity} ({row.unit})", values.get(first)]
        for model in others:
            line += [values.get(model), row.differences.get(model)]
        lines.append(line)
    note = (
        "Sink rates are percent of (sequence, layer, head) triples. Norm ratios compare position 1 with the mean of "
        "the others. Each model uses its own tokenizer. Losses per token are not compared if the vocabularies differ "
        "or are unknown, or a chat template writes the text of only one model; bits per byte of the same text are "
        "comparable between tokenizers."
    )
    return Table("Comparison of models", columns, lines, [note])


def difference_sentence(rows: Iterable[ComparedQuantity]) -> str:
    """Return a sentence on the sink rates and losses of compared models, the first of which is the reference."""
    known = {row.quantity: row for row in rows if row.quantity in ("Sink_1", "loss")}
    if "Sink_1" not in known:
        return ""
    (first, rate), *others = known["Sink_1"].values.items()
    parts = []
    for model, other in others:
        gap, loss = known["Sink_1"].differences.get(model), None
        if "loss" in known:
            loss = known["loss"].differences.get(model)
        about = "" if gap is None else f" ({gap:+.1f} points)"
        about += " on other tokens" if loss is None else f" at {loss:+.3f} nats per token of loss"
        parts.append(f"in {model} in {other or 0:.1f} %{about}")
    return f"In {first} the first token is a sink in {rate or 0:.1f} % of the heads, {', '.join(parts)}."


def ablations_table(measured: Labelled) -> Table | None:
    """Make a table with a row per measured ablation; None if there are none."""
    found = [(label, one) for label, m in measured for one in m.ablations or ()]
    columns = {
        "name": TableColumn("Ablated part", text=True),
        "loss_before": TableColumn("Loss", "nats / token", ".4f"),
        "loss_after": TableColumn("Ablated", "nats / token", ".4f"),
        "loss_change": TableColumn("Change", "nats / token", "+.4f"),
        "sink_rate_before": TableColumn(SINK_1, "% of heads", ".2f"),
        "sink_rate_after": TableColumn("Ablated", "% of heads", ".2f"),
        "highest_after": TableColumn("Highest sink, ablated", "% at position"),
    }
    notes = [
        "Both losses of an ablation are computed over the same targets.",
        "The highest sink is the maximum over positions 1 to T / 2; an ablation can shift the sink to another token.",
        *(
            f"{_prefix(label)}{one.name}: {'; '.join(one.sentences)}; targets from position {one.first_target} on."
            for label, one in found
        ),
    ]
    rows = [[label, *(getattr(one, field) for field in columns)] for label, one in found]
    return _by_model("Ablations: loss and sink rate", list(columns.values()), rows, notes, "ablations")


def propositions_table(measured: Labelled) -> Table | None:
    """Make a table with a row per measurement of repeated tokens; None if there are none."""
    found = [(label, one) for label, m in measured if (one := m.propositions)]
    columns = [
        TableColumn("Positions", "embedding", text=True),
        TableColumn("Hidden states", "relative difference", ".1e"),
        TableColumn("Attention", "deviation from the closed form or 1/t", ".1e"),
        TableColumn("Bound", "minimum slack", ".1e"),
        TableColumn("Proposition", "within rounding", text=True),
    ]
    rows: list[list[Value]] = []
    for label, one in found:
        says = (
            ("holds", "does not hold")
            if one.number
            else ("none; hidden states are equal", "none; hidden states differ")
        )
        verdict = f"inconclusive in {one.dtype}" if one.holds is None else says[not one.holds]
        numbers = (one.hidden_deviation, one.attention_deviation, one.bound_slack)
        rows.append([label, one.position, *numbers, verdict])
    notes = [
        f"{_prefix(label)}{f'proposition {one.number}' if one.number else 'no proposition'} of the paper: "
        f"{one.statement}."
        for label, one in found
    ]
    return _by_model("Repeated tokens: the paper's propositions", columns, rows, notes, "propositions")


def _by_model(
    title: str, columns: list[TableColumn], rows: list[list[Value]], notes: Sequence[str], key: str
) -> Table | None:
    """Return a table whose first column is the model, unless that column is empty; None without rows."""
    if not rows:
        return None
    named = any(row[0] for row in rows)
    columns = [*names("Model"), *columns] if named else columns
    return Table(title, columns, rows if named else [row[1:] for row in rows], notes, key)


def _prefix(label: str) -> str:
    return f"{label}, " if label else ""


def measurement_tables(m: Measurement, full: bool = True) -> list[Table]:
    """Make the tables of one measurement, for the terminal and notebooks.

    Args:
        full: False for a table of at most six numbers instead of those by position and layer; tables that an option
            adds (lengths, ablations, ...) are always included.
    """
    one = [("", m)]
    made = [_positions(m), layers_table(one), _massive(m)] if full else [_main_numbers(m)]
    made += [_by_length(m), *(make(one) for make in (ablations_table, mixing_table, propositions_table))]
    made.append(secondary_table(one, SHOWN_SINKS) if full else None)
    return [table for table in made if table is not None]


def _main_numbers(m: Measurement) -> Table:
    """Make the table of the numbers of the first token that a reader looks at first."""
    heads_LH = m.importance[:, :, 0]
    layer, head = divmod(int(heads_LH.argmax()), m.heads)
    scores = ", by scores over their sum (proxy)" if m.proxy else ""
    rows: list[list[Value]] = [
        [SINK_1, f"{m.sink_rate[0]:.1f} %", f"of heads give it over {m.eps:g} (eps) of attention{scores}"],
        ["strongest head", f"{heads_LH.max():.2f}", f"of the attention of layer {layer + 1}, head {head + 1}"],
    ]
    norms = m.hidden_norm_ratio or [math.inf]
    if math.isfinite(largest := max(norms)):
        after = norms.index(largest)
        place = f"after block {after}" if after else "in the embedding"
        rows.append(["largest norm", f"{largest:.1f} x", f"the mean of the other tokens, {place}"])
    if m.value_norm_ratio:
        rows.append(
            ["its value vectors", f"{median(m.value_norm_ratio):.2f} x", "the norm of the others, median layer"]
        )
    if m.massive_activations:
        top = m.massive_activations[0]
        where = f"channel {top.dimension}" + (f" of position {top.position}" if top.position > 1 else "")
        rows.append(["largest activation", f"{top.ratio_to_median:,.0f} x", f"the median of its block ({where})"])
    if m.loss is not None:
        bits = "" if m.bits_per_byte is None else f"; {m.bits_per_byte:.3f} bits per byte"
        rows.append(["loss", f"{m.loss:.3f}", f"nats (-log p) per token{bits}"])
    heading = "BOS, the first token" if m.bos else "The first token"
    return Table("", [TableColumn(heading, text=True), TableColumn(""), TableColumn("", text=True)], rows)


def measurement_title(m: Measurement) -> str:
    """Return model, revision, number and length of the sequences, and inputs of a measurement."""
    name = Path(m.model).name if m.model.startswith(("/", ".")) else m.model
    model = (name or "model") + (f" at {m.revision}" if m.revision else "")
    return f"{model}: {plural(m.sequences, 'sequence')} of {m.length} tokens, {m.inputs}"


def measurement_facts(m: Measurement) -> list[str]:
    """Return facts about a measurement, such as step, BOS, loss and backend, in a few words each."""
    facts = [
        None if m.step is None else f"step {m.step:,} of {m.planned_steps:,}",
        "position 1 is BOS" if m.bos else "no BOS",
        f"loss {m.loss:.4f} nats/token" if m.loss is not None else None,
        f"{m.bits_per_byte:.4f} bits/byte" if m.bits_per_byte is not None else None,
        "proxy scores" if m.proxy else None,
        f"{m.backend}, {m.dtype}, {m.seconds:.1f} s",
    ]
    return [fact for fact in facts if fact]


def _positions(m: Measurement) -> Table:
    """Make the table of sink rates (by threshold) and importance by position.

    Rows are the first `POSITIONS` positions, the maximum over later positions, and a bias if there is one. The maximum
    excludes the second half of the sequence: few queries see these keys, so that the attention of a token to itself
    dominates the mean over queries.
    """
    shown, half = min(POSITIONS, m.length), m.length // 2
    rates = rates_by_eps(m)
    biases = m.sink_rates_bias or {f"{m.eps:g}": m.sink_rate_bias}
    visible = m.sink_rates_visible or ({f"{m.eps:g}": m.sink_rate_visible} if m.sink_rate_visible else {})
    columns: list[tuple[TableColumn, Sequence[float], float | None]] = [
        *((TableColumn("sink rate", f"%, eps {eps}", ".2f"), found, biases.get(eps)) for eps, found in rates.items()),
        *((TableColumn("visible rate", f"%, eps {eps}", ".2f"), found, None) for eps, found in visible.items()),
        (TableColumn("importance", "times uniform", ".2f"), m.uniform_ratio, None),
    ]
    rows: list[list[Value]] = [[str(k + 1), *(found[k] for _, found, _ in columns)] for k in range(shown)]
    if half > POSITIONS:
        tops = [max(range(POSITIONS, half), key=found.__getitem__) for _, found, _ in columns]
        highest = [TableCell(found[top], f"at {top + 1}") for (_, found, _), top in zip(columns, tops, strict=True)]
        rows.append([f"highest of {POSITIONS + 1} to {half}", *highest])
    if any(bias is not None for _, _, bias in columns):
        rows.append(["bias", *(bias for _, _, bias in columns)])
    heads = [TableColumn("position", text=True), *(column for column, _, _ in columns)]
    notes = ["visible rate: averaged over the queries that can see the position"] if visible else []
    return Table("Sink rate and importance by position", heads, rows, notes)


def _by_length(m: Measurement) -> Table | None:
    if not m.sink_rate_by_length:
        return None
    thresholds = next(iter(m.sink_rate_by_length.values()))
    heads = [*names("T"), *numbers(".2f", *(f"eps {eps}" for eps in thresholds))]
    whole = rates_by_eps(m)
    lengths = {**m.sink_rate_by_length, str(m.length): whole}
    rows = [[length, *(rate[0] for rate in rates.values())] for length, rates in lengths.items()]
    return Table("Sink rate of position 1 by length (%)", heads, rows)


def _massive(m: Measurement) -> Table | None:
    if not m.massive_activations:
        return None
    heads = numbers("d", "after layer", "position", "dimension")
    heads += [TableColumn("value", form=".1f"), TableColumn("times the median", form=".0f")]
    largest = m.massive_activations[:3]
    rows = [(one.layer, one.position, one.dimension, one.value, one.ratio_to_median) for one in largest]
    return Table("Largest activations", heads, rows)


def layers_table(measured: Labelled) -> Table:
    """Make a table with a row per layer: importance, norm ratios and gradient of position 1, row sums, and statistics.

    A row for the embedding is added if hidden states were measured. Each statistic of --details with a `column` adds
    this column; empty columns are omitted.
    """
    statistics = {label: _statistics(m.details, m.layers) if m.details else {} for label, m in measured}
    titles = list(dict.fromkeys(title for found in statistics.values() for title in found))
    heads = [
        *names("layer"),
        *numbers(".3f", "importance", "visible"),
        *numbers("", "highest head"),
        *numbers(".2f", "|h|", "|k|", "|v|", "gradient", "row sum"),
        *numbers("", *titles),
    ]

    def at(values: Sequence[float] | None, index: int) -> float | None:
        return values[index] if values else None

    rows: list[list[Value]] = []
    for label, m in measured:
        hidden = m.hidden_norm_ratio or []
        aligned = len(hidden) == m.layers + 1  # false for hybrid models, in which some blocks have no attention
        if hidden:
            rows.append([f"{_prefix(label)}input", None, None, None, hidden[0], *[None] * (4 + len(titles))])
        for layer in range(m.layers):
            heads_H = m.importance[layer, :, 0]
            found: list[Value] = [
                f"{_prefix(label)}{'layer ' if label else ''}{layer + 1}",
                float(heads_H.mean()),
                None if m.importance_visible is None else float(m.importance_visible[layer, :, 0].mean()),
                f"{heads_H.max():.3f} (head {int(heads_H.argmax()) + 1})",
                hidden[layer + 1] if aligned else None,
                *(at(norms, layer) for norms in (m.key_norm_ratio, m.value_norm_ratio, m.gradient_norm_ratio)),
                None if m.row_sums is None else float(m.row_sums[layer].mean()),
            ]
            rows.append([*found, *(statistics[label].get(title, {}).get(layer) for title in titles)])
    gradient = (
        "gradient: norm of the loss gradient at the attention input, relative to the mean over positions 2 to 32."
    )
    notes = [
        "|h|, |k|, |v|: norm relative to the mean over the other positions." * bool(rows),
        gradient * any(bool(m.gradient_norm_ratio) for _, m in measured),
        "a / b: value for position 1 / for the other positions." * bool(titles),
    ]
    note = " ".join(filter(None, notes))
    return Table("Position 1 by layer", heads, rows, [note]).without_empty_columns()


def _statistics(d: Details, layers: int) -> Mapping[str, Mapping[int, str]]:
    """Return the columns of the statistics, angles first: formatted values by title of the column and 0-based layer."""
    columns: dict[str, dict[int, str]] = {}
    for statistic, array in sorted(d.present(), key=lambda one: not isinstance(one[0], OfAngles)):
        if (column := statistic.column) is None:
            continue
        found = [column.of(array)] if column.of else [d.by_layer[field] for field in statistic.fields]
        known = [values for values in found if values is not None]
        if statistic.axes.startswith("M"):
            known = [values[1:] for values in known if len(values) == layers + 1]  # only if every block has attention
        if known:
            columns[column.title] = {
                layer: " / ".join(f"{value:.{column.decimals}f}" for value in pair)
                for layer, pair in enumerate(zip(*known, strict=True))
            }
    return columns


def mixing_table(measured: Labelled) -> Table | None:
    """Make a table of the change of later hidden states after a token is replaced, by block; None if not measured."""
    found = [(label, one) for label, m in measured if (one := m.mixing)]
    if not found:
        return None
    heads = [TableColumn("after block", text=True), *numbers(".4f", "unchanged", "without key 1")]
    heads += numbers(".2f", "ratio")
    rows = [
        (f"{_prefix(label)}{block or 'input'}", whole, without, without / whole if whole else None)
        for label, one in found
        for block, (whole, without) in enumerate(zip(one.spread, one.spread_without_first, strict=True))
    ]
    position = " or ".join(map(str, sorted({one.position for _, one in found})))
    title = f"Replacement of the token at position {position}: relative change of later hidden states"
    return Table(title, heads, rows)


def secondary_table(measured: Labelled, shown: int | None = None) -> Table | None:
    """Make a table of the secondary sinks (`measuring/statistics/secondary.py`); None if there are none.

    Args:
        shown: maximum number of sinks of a model at positions 2 to 4, and again at later positions; None shows all.
    """
    found: list[tuple[str, SecondarySink]] = []
    rates: list[str] = []
    for label, m in measured:
        if m.details is not None and m.details.secondary_sinks:
            sinks = m.details.secondary_sinks
            found += [(label, one) for one in (first_of_each(sinks, shown) if shown else sinks)]
            rates.append(f"{_prefix(label)}{m.details.secondary_rate:.2f} %")
    if not found:
        return None
    heads = [*names("sequence and position"), *numbers("", "token id"), *numbers(".1f", "heads (%)")]
    heads += [*numbers(".3f", "importance"), *numbers(".2f", "cosine with token 1")]
    heads += numbers("", "sink in layers", "aligned with token 1 after blocks")
    rows = [
        (
            f"{_prefix(label)}sequence {one.sequence}, position {one.position}",
            str(one.token),
            one.heads,
            one.importance,
            None if one.alignment is None else TableCell(one.alignment, f"after block {one.block}"),
            *(ranges_text(found) if found else NOTHING for found in (one.layers, one.alike)),
        )
        for label, one in found
    ]
    title = f"Sinks after position 1 (positions {FIRST_FEW + 1} to T / 2: {', '.join(rates)} of heads and sequences)"
    return Table(title, heads, rows)


ERROR = TableColumn("Error", "± standard", ".3f")


def settings_table(document: Assessment, settings: Sequence[JudgedSetting], key: str = "", of: str = "") -> Table:
    """Make a table of settings with their added losses and verdicts, by kind.

    Args:
        key: anchor of the table in the page.
        of: appended to the title.
    """
    columns = [*names("Kind", "Setting"), TableColumn("Loss added", "nats / token", "+.3f"), ERROR, *names("Verdict")]
    rows: list[list[Value]] = []
    before = None
    for one in settings:
        verdict = TableCell(one.verdict, tone="reproduced" if one.verdict == SAFE else "inconclusive")
        rows.append([one.kind if one.kind != before else "", one.name, one.added, one.error, verdict])
        before = one.kind
    return Table(f"Settings{of}: safe up to {document.tolerance:+g} nats per token", columns, rows, key=key)


def answers_table(document: Assessment, key: str = "", of: str = "") -> Table:
    """Make a table of the answers to the questions of the assessment that are not in the table of settings.

    Args:
        key: anchor of the table in the page.
        of: appended to the title.
    """
    columns = [*names("Question", "Change"), TableColumn("Loss added", "nats / token", "+.4f"), ERROR]
    rows: list[list[Value]] = []
    before = None
    settings = {(one.kind, one.name) for one in document.settings()}
    kinds = {part.question: part.setting for part in document.results.values()}
    for question, one in document.answers():
        if (kinds[question], one.answer) in settings:
            continue
        rows.append([question if question != before else "", one.answer, one.added, one.error])
        before = question
    return Table(f"Loss without the sink, and its cost{of}", columns, rows, _remarks(document), key)


def _remarks(document: Assessment) -> list[str]:
    skipped = [f"Skipped: {part}: {why}" for part, why in document.skipped.items()]
    return [*document.errors(), *skipped, *document.notes]


def assessment_table(document: Assessment, title: str = "Costs and benefits of the sink", key: str = "") -> Table:
    """Make a table of loss, added loss, perplexity and KL divergence under the interventions, ordered by part."""
    columns = [
        *names("Part", "Change"),
        TableColumn("Loss", "nats / token", ".4f"),
        TableColumn("Added", "nats / token", "+.4f"),
        TableColumn("Perplexity"),
        TableColumn("KL", "from the unchanged model", ".4f"),
        *names("Remark"),
    ]
    rows = []
    for part in document.results.values():
        shown = [(row, effect) for row in part.rows() if (effect := row.effect)]
        for number, (row, effect) in enumerate(shown):
            name, perplexity = "" if number else part.name, f"{math.exp(effect.loss):,.2f}" if effect.loss < 20 else "–"
            rows.append((name, row.what, effect.loss, row.added, perplexity, effect.kl, row.more))
    notes = [*(f"{remark}." for remark in document.remarks()), *_remarks(document)]
    return Table(title, columns, rows, notes, key)
