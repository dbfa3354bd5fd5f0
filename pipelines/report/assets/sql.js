// SQL for reading: coloured by kind of token, broken into lines by clause, compared token by token.
const KEYWORDS = new Set(
  ("select from where group by order having limit offset union intersect except all distinct as on using join inner " +
    "left right full outer cross natural and or not in is null like glob between exists case when then else end asc " +
    "desc with recursive values cast collate escape over partition filter").split(" ")
);
const TOKEN = /--[^\n]*|\/\*[^]*?\*\/|'(?:[^']|'')*'?|"(?:[^"]|"")*"?|`[^`]*`?|\d+(?:\.\d+)?|[\p{L}_][\p{L}\p{N}_$]*|\s+|[<>!=]=|<>|\|\||[^]/gu;
const CLAUSES = new Set("from where group order having limit union intersect except".split(" "));
const JOINERS = new Set("join left right inner cross natural full".split(" "));
const LONG = 64; // shorter queries stay on one line
const MOST = 400; // tokens beyond which two queries are not compared

function tokens(sql) {
  return (sql.match(TOKEN) || []).map((text) => ({ text, kind: kindOf(text), blank: !text.trim() }));
}

function kindOf(text) {
  if (/^(--|\/\*)/.test(text)) return "com";
  if (/^['"`]/.test(text)) return "str";
  if (/^\d/.test(text)) return "n";
  return KEYWORDS.has(text.toLowerCase()) ? "k" : "";
}

// Line breaks before the clauses of the outermost query, unless the text has its own.
function breakLines(list, length) {
  if (length < LONG || list.some((token) => token.text.includes("\n"))) return list;
  let depth = 0;
  let last = "";
  return list.map((token, at) => {
    if (token.text === "(") depth += 1;
    if (token.text === ")") depth -= 1;
    const next = list[at + 1] ? list[at + 1].text.toLowerCase() : "";
    const breaks = token.blank && depth === 0 && (CLAUSES.has(next) || (JOINERS.has(next) && !JOINERS.has(last)));
    if (!token.blank) last = token.text.toLowerCase();
    return breaks ? { ...token, text: "\n" } : token;
  });
}

// Tokens of `mine` that are in no longest common subsequence with `other`: what the two queries do not share.
function ownTokens(mine, other) {
  const [a, b] = [mine, other].map((list) => list.filter((token) => !token.blank));
  if (!a.length || !b.length || a.length > MOST || b.length > MOST) return new Set();
  const same = (i, j) => a[i].text.toLowerCase() === b[j].text.toLowerCase();
  const best = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      best[i][j] = same(i, j) ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  const own = new Set();
  for (let i = 0, j = 0; i < a.length; ) {
    if (j < b.length && same(i, j)) { i++; j++; }
    else if (j < b.length && best[i][j + 1] >= best[i + 1][j]) j++;
    else own.add(a[i++]);
  }
  return own;
}

function sqlBlock(sql, other) {
  const list = tokens(sql);
  const own = other ? ownTokens(list, tokens(other)) : new Set();
  const marked = list.map((token) => ({ ...token, own: own.has(token) }));
  const spans = breakLines(marked, sql.length).map((token) => {
    const classes = [token.kind, token.own && "diff"].filter(Boolean).join(" ");
    return classes ? el("span", { class: classes }, token.text) : token.text;
  });
  return el("pre", { class: "sql" }, spans);
}
