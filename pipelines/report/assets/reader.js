// The list of trajectories: filtered, searched, and drawn only where it is looked at.
const HEIGHT = 58; // pixels of one row, as in reader.css
const MARGIN = 6; // rows drawn beyond the visible ones

class Reader {
  constructor(index) {
    this.index = index;
    this.rows = index.rows.map((cells, at) => {
      const [question, system, mode, sample, verdict, error, level, turns, flip] = cells;
      return { at, question, system, mode, sample, verdict, error, level, turns, flip, sql: index.sql[at] };
    });
    this.chunks = new Map();
    this.shown = this.rows;
    this.chosen = null;
    this.list = byId("list");
    this.body = el("div", { class: "rows" });
    this.list.append(this.body);
    this.filters = this.makeFilters();
    if (index.systems.length > 1) byId("by-system").value = String(index.systems.length - 1);
    this.listen();
    this.filter();
  }

  makeFilters() {
    const { systems, levels, errors, questions } = this.index;
    const used = (key) => new Set(this.rows.map((row) => row[key]));
    const databases = [...new Set(questions.map((question) => question.database))].sort();
    const database = (row) => questions[row.question].database;
    const spec = {
      system: [systems.map((name, at) => [at, name]), (row, value) => row.system === Number(value)],
      mode: [[[0, "greedy"], [1, "sampled"]].filter(([at]) => used("mode").has(at)), (row, value) => row.mode === Number(value)],
      verdict: [[[1, "right"], [0, "wrong"], [2, "broken"]], (row, value) => row.verdict === Number(value)],
      level: [levels.map((name, at) => [at, name]).filter(([at]) => used("level").has(at)), (row, value) => row.level === Number(value)],
      error: [errors.map((name, at) => [at, name]), (row, value) => row.error === Number(value)],
      flip: [[[1, "became right"], [-1, "became wrong"]], (row, value) => row.flip === Number(value)],
      database: [databases.map((name) => [name, name]), (row, value) => database(row) === value],
    };
    return Object.entries(spec).map(([name, [options, test]]) => {
      const select = byId(`by-${name}`);
      select.append(el("option", { value: "" }, "all"), ...options.map(([value, text]) => el("option", { value }, text)));
      select.parentElement.hidden = options.length < 2;
      return { select, test };
    });
  }

  listen() {
    byId("filters").addEventListener("input", () => this.filter());
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("filters").addEventListener("reset", () => setTimeout(() => this.filter()));
    this.list.addEventListener("scroll", () => this.draw());
    this.list.addEventListener("click", (event) => {
      const item = event.target.closest(".item");
      if (item) this.choose(this.rows[Number(item.dataset.at)]);
    });
    new ResizeObserver(() => this.draw()).observe(this.list);
  }

  filter() {
    const active = this.filters.filter(({ select }) => select.value !== "");
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    this.shown = this.rows.filter((row) =>
      active.every(({ select, test }) => test(row, select.value)) && words.every((word) => this.text(row).includes(word)));
    this.place = new Map(this.shown.map((row, at) => [row, at]));
    const right = this.shown.filter((row) => row.verdict === 1).length;
    byId("count").textContent = this.shown.length
      ? `${plural(this.shown.length, "trajectory", "trajectories")}, ${right.toLocaleString("en")} right`
      : "No trajectory matches";
    this.body.style.height = `${this.shown.length * HEIGHT}px`;
    this.list.scrollTop = 0;
    this.draw();
  }

  // What the search looks at; made once a row, when it is first needed.
  text(row) {
    if (row.text === undefined) {
      const question = this.index.questions[row.question];
      row.text = [question.text, question.evidence, question.id, question.database, question.gold, row.sql].join("\n").toLowerCase();
    }
    return row.text;
  }

  draw() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / HEIGHT) - MARGIN);
    const last = Math.min(this.shown.length, Math.ceil((this.list.scrollTop + this.list.clientHeight) / HEIGHT) + MARGIN);
    const items = [];
    for (let at = first; at < last; at++) items.push(this.item(this.shown[at], at));
    this.body.replaceChildren(...items);
  }

  item(row, at) {
    const { index } = this;
    const question = index.questions[row.question];
    const where = [index.systems[row.system], index.levels[row.level], row.mode === 1 ? `sample ${row.sample}` : null,
      plural(row.turns, "turn"), row.error >= 0 ? index.errors[row.error] : null].filter(Boolean).join(" · ");
    const node = el("div",
      { class: "item", role: "option", id: `item-${row.at}`, "data-at": row.at, "aria-selected": String(row === this.chosen),
        "aria-posinset": at + 1, "aria-setsize": this.shown.length },
      sign(row.verdict), el("div", { class: "asked" }, question.text), el("div", { class: "where" }, where));
    node.style.top = `${at * HEIGHT}px`;
    return node;
  }

  trajectory(row) {
    const number = Math.floor(row.at / this.index.chunk);
    if (!this.chunks.has(number)) this.chunks.set(number, readBlock(`chunk-${number}`));
    return this.chunks.get(number)[row.at % this.index.chunk];
  }

  siblings(row) {
    return this.rows.filter((other) =>
      other.question === row.question && other.mode === row.mode && other.sample === row.sample);
  }

  choose(row, { quiet = false } = {}) {
    this.chosen = row;
    const question = this.index.questions[row.question];
    const parts = detailOf(row, this.trajectory(row), question, this.index, this.siblings(row), (other) => this.choose(other));
    byId("detail").replaceChildren(...parts);
    byId("detail").scrollTop = 0;
    this.list.setAttribute("aria-activedescendant", `item-${row.at}`);
    this.reveal(row);
    this.draw();
    if (!quiet) history.replaceState(null, "", `#trajectory-${row.at}`);
  }

  reveal(row) {
    const at = this.place.get(row);
    if (at === undefined) return;
    const top = at * HEIGHT;
    const { scrollTop, clientHeight } = this.list;
    const far = top < scrollTop - HEIGHT || top > scrollTop + clientHeight;
    if (far) this.list.scrollTop = top - clientHeight / 2;
    else this.list.scrollTop = Math.min(Math.max(scrollTop, top + HEIGHT - clientHeight), top);
  }

  step(by) {
    const at = this.place.get(this.chosen);
    this.jump(at === undefined ? 0 : at + by);
  }

  jump(at) {
    const last = this.shown.length - 1;
    if (last >= 0) this.choose(this.shown[Math.min(Math.max(at, 0), last)]);
  }

  across(by) {
    if (!this.chosen) return;
    const siblings = this.siblings(this.chosen);
    const next = siblings[siblings.indexOf(this.chosen) + by];
    if (next) this.choose(next);
  }
}
