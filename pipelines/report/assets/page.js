// What holds the page together: theme, tooltips, navigation, keys.
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
const nameTheme = () => { byId("theme").textContent = isDark() ? "Light" : "Dark"; };

function toggleTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
}

function showTip(event) {
  const target = event.target.closest && event.target.closest("[data-tip]");
  const tip = byId("tip");
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.dataset.tip;
  const box = target.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 56 ? above : box.bottom + 8}px`;
}

function followSections() {
  const links = new Map([...document.querySelectorAll(".top nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((each) => each.isIntersecting)) {
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id).setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-15% 0px -80% 0px" });
  for (const id of links.keys()) seen.observe(byId(id));
}

function onKey(event, reader) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = { t: toggleTheme, "?": () => byId("keys").showModal() };
  if (reader) Object.assign(keys, {
    "/": () => byId("search").focus(),
    j: () => reader.step(1), k: () => reader.step(-1),
    "]": () => reader.across(1), "[": () => reader.across(-1),
  });
  if (reader && event.target === reader.list) Object.assign(keys, {
    ArrowDown: () => reader.step(1), ArrowUp: () => reader.step(-1),
    Home: () => reader.jump(0), End: () => reader.jump(Infinity), Enter: () => byId("detail").focus(),
  });
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
}

function begin() {
  nameTheme();
  prefersDark.addEventListener("change", nameTheme);
  byId("theme").addEventListener("click", toggleTheme);
  byId("help").addEventListener("click", () => byId("keys").showModal());
  byId("close-keys").addEventListener("click", () => byId("keys").close());
  document.addEventListener("pointerover", showTip);
  followSections();
  const reader = byId("index") && new Reader(readBlock("index"));
  document.addEventListener("keydown", (event) => onKey(event, reader));
  if (!reader) return;
  const linked = /^#trajectory-(\d+)$/.exec(location.hash);
  const start = (linked && reader.rows[Number(linked[1])]) || reader.shown[0];
  if (start) reader.choose(start, { quiet: true });
  if (linked) byId("trajectories").scrollIntoView({ behavior: "instant" });
}

begin();
