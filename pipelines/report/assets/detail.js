// One trajectory from question to verdict.
const SIGNS = [["✗", "wrong"], ["✓", "right"], ["○", "broken"]]; // by verdict
const ACTIONS = {
  sql: "runs a query", explore: "explores", propose: "proposes a schema", generate: "tries a query",
  solution: "answers", invalid: "is not understood",
};
const STOPS = { turn_limit: "the turn limit was reached", token_limit: "the token budget was spent", broken: "it broke", unasked: "it was not asked" };

function sign(verdict) {
  const [mark, name] = SIGNS[verdict];
  return el("span", { class: `sign ${name}`, role: "img", "aria-label": name }, mark);
}

function detailOf(row, trajectory, question, index, siblings, choose) {
  return [
    el("h3", null, question.text),
    question.evidence ? el("p", { class: "evidence" }, question.evidence) : null,
    el("p", { class: "meta" }, facts(row, trajectory, question, index)),
    switcher(row, siblings, index, choose),
    verdictLine(row, trajectory, index),
    scores(trajectory),
    el("h4", null, "Answer and gold"),
    answers(row, trajectory, question),
    hints(trajectory),
    trajectory.turns.length ? el("h4", null, plural(trajectory.turns.length, "turn")) : null,
    el("ol", { class: "turns" }, trajectory.turns.map(turn)),
    schema(index.schemas[question.database], question.database),
  ].filter(Boolean);
}

function facts(row, trajectory, question, index) {
  const [read, written] = trajectory.tokens;
  return [
    question.database, index.levels[row.level], question.id,
    row.mode === 1 ? `sample ${row.sample}` : "greedy",
    question.needs_probe ? "needs a probe" : null,
    written === null ? null : `${read.toLocaleString("en")} tokens in, ${written.toLocaleString("en")} out`,
    trajectory.forced ? "last turn forced" : null,
    trajectory.stop ? STOPS[trajectory.stop] : null,
  ].filter(Boolean).join(" · ");
}

// The same question in every system (and, for samples, the same sample).
function switcher(row, siblings, index, choose) {
  if (siblings.length < 2) return null;
  const buttons = siblings.map((other) => {
    const button = el("button", { type: "button", "aria-pressed": String(other === row) },
      sign(other.verdict), index.systems[other.system]);
    button.addEventListener("click", () => choose(other));
    return button;
  });
  return el("div", { class: "switch", role: "group", "aria-label": "The same question by system" }, buttons);
}

function verdictLine(row, trajectory, index) {
  const [, name] = SIGNS[row.verdict];
  const say = {
    broken: [el("b", null, "Broken"), `: ${trajectory.failure || "a boundary failed"}. It counts nowhere.`],
    right: [el("b", null, "Right"), ` by ${index.equality}.`],
    wrong: [el("b", null, "Wrong"), ` by ${index.equality}.`],
  };
  const why = row.error >= 0 ? [" ", el("b", null, `${capital(index.errors[row.error])}: `), trajectory.evidence] : [];
  return el("p", { class: `verdict ${name}` }, say[name], why);
}

const capital = (word) => word.charAt(0).toUpperCase() + word.slice(1);

function scores(trajectory) {
  const names = Object.entries(trajectory.scores);
  if (names.length < 2 || trajectory.failure) return null;
  return el("ul", { class: "chips", "aria-label": "Verdicts by equality" }, names.map(([name, score]) =>
    el("li", null, score === 0 || score === 1 ? sign(score) : `${score.toFixed(2)} `, name)));
}

function answers(row, trajectory, question) {
  const said = row.sql;
  const empty = el("pre", { class: "sql" }, el("span", { class: "com" }, "no final SQL"));
  const differ = row.verdict === 0 && said;
  return el("div", { class: "pair" },
    el("div", null,
      el("div", { class: "label" }, outcome(trajectory, said)),
      said ? sqlBlock(said, differ ? question.gold : null) : empty,
      rowset(trajectory.result, question.result)),
    el("div", null,
      el("div", { class: "label" }, `Gold, ${plural(trajectory.gold_rows, "row")}`),
      sqlBlock(question.gold, differ ? said : null),
      differ ? rowset(question.result, trajectory.result) : null));
}

function outcome(trajectory, said) {
  if (!said) return "Answer";
  return `Answer, ${trajectory.status ? trajectory.status : plural(trajectory.rows, "row")}`;
}

// The first rows of a result; those that the other result's first rows lack are marked.
function rowset(mine, other) {
  if (!mine) return null;
  const known = new Set((other ? other.rows : []).map((row) => JSON.stringify(row)));
  const rows = mine.rows.map((row) =>
    el("tr", { class: other && !known.has(JSON.stringify(row)) ? "only" : null }, row.map((cell) => el("td", null, cell))));
  const more = mine.total - mine.rows.length;
  return el("div", { class: "rowset scroll", tabindex: "0" },
    el("table", null,
      el("thead", null, el("tr", null, mine.columns.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", null, rows)),
    more > 0 ? el("p", { class: "more" }, `and ${plural(more, "more row")}`) : null);
}

function hints(trajectory) {
  if (!trajectory.hints.length) return null;
  return el("ul", { class: "hints", "aria-label": "Clues" }, trajectory.hints.map(([kind, detail]) =>
    el("li", null, el("span", { class: "kind" }, kind), el("span", null, detail))));
}

function turn(each, at) {
  const flag = each.format_error ? el("span", { class: "flag" }, each.format_error.replaceAll("_", " ")) : null;
  const isJson = each.kind === "propose";
  return el("li", { class: "turn" },
    el("span", { class: "number", "aria-hidden": "true" }, String(at + 1)),
    el("div", { class: "head" }, el("b", null, ACTIONS[each.kind] || each.kind), ran(each), flag),
    each.reasoning ? el("p", { class: "think" }, each.reasoning) : null,
    each.content ? (isJson ? el("pre", null, each.content) : sqlBlock(each.content)) : null,
    each.raw ? el("details", null, el("summary", null, "The turn as generated"), el("pre", null, each.raw)) : null,
    each.observation ? el("div", { class: "seen" }, el("pre", { tabindex: "0" }, each.observation.trim())) : null);
}

function ran(each) {
  if (!each.status) return null;
  if (each.status === "ok") return ` · ${plural(each.rows || 0, "row")}`;
  return el("span", { class: "flag" }, (each.error || each.status).replaceAll("_", " "));
}

function schema(text, database) {
  if (!text) return null;
  return el("details", null, el("summary", null, `Schema of ${database}`), el("pre", null, text));
}
