// Figures and tables: the report's values as they are, and the selected request.

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function key(name) {
  const mark = element("i", { class: "key" });
  mark.style.background = `var(--${name})`;
  return mark;
}

function rowsTable(rows) {
  return element("table", {}, ...rows.map(([word, value, name]) =>
    element("tr", {}, element("td", {}, ...(name ? [key(name)] : []), word), element("td", {}, value))));
}

function showHead(model) {
  const report = model.report, roles = new Map();
  for (const rank of report.workers) roles.set(rank.pool, (roles.get(rank.pool) || 0) + 1);
  document.getElementById("name").textContent = report.scenario;
  document.getElementById("about").textContent = [
    `g2sim ${report.version}`, `seed ${report.seed}`,
    [...roles].map(([pool, n]) => `${n} ${pool} rank${n > 1 ? "s" : ""}`).join(", "),
    `router ${model.router.policy}`, `blocks of ${model.block_size_tokens} tokens`, `run ${model.run}`,
  ].join(" · ");
  document.getElementById("why").textContent = model.why || "";
  const trouble = [
    model.failure && `The run failed: ${model.failure}`,
    model.damage && `The log is good only up to here: ${model.damage}`,
    !model.failure && !model.damage && !report.finished && "The log ends before the run does: figures up to there.",
    report.stopped_at_limit && "The run stopped at its virtual time limit.",
  ].filter(Boolean);
  for (const [id, texts] of [["banner", trouble], ["notes", report.notes.map((note) => `Note: ${note}`)]]) {
    const box = document.getElementById(id);
    box.hidden = !texts.length;
    box.replaceChildren(...texts.map((text) => element("div", {}, text)));
  }
}

function showTiles(model) {
  const report = model.report, S = report.summary, T = report.totals, N = report.requests;
  const value = (field, text) => element("span", { "data-field": field }, text);
  const tile = (title, big, more, width = "one") =>
    element("div", { class: `tile ${width}` }, element("h2", {}, title), element("div", { class: "big" }, ...big),
      ...more.map((line) => element("div", { class: "more" }, ...line)));
  const small = (text) => element("small", {}, ` ${text}`);
  const latency = (title, metric) => !S[`num_${metric}_samples`] ? tile(title, ["-"], [["no samples"]]) : tile(title,
    [value(`summary.median_${metric}_ms`, fixed(S[`median_${metric}_ms`])), small("ms median")],
    [["mean ", value(`summary.mean_${metric}_ms`, fixed(S[`mean_${metric}_ms`])), " · p90 ", value(`summary.p90_${metric}_ms`, fixed(S[`p90_${metric}_ms`]))],
      ["p99 ", value(`summary.p99_${metric}_ms`, fixed(S[`p99_${metric}_ms`])), " · max ", value(`summary.max_${metric}_ms`, fixed(S[`max_${metric}_ms`]))]]);
  const others = Object.entries(N).filter(([name, n]) => n && name !== "released" && name !== "completed");
  const parts = [["g1", "from G1", "prompt_tokens_from_g1"], ["g2", "from G2", "prompt_tokens_from_g2"],
    ["computed", "computed", "prompt_tokens_computed"]];
  const bar = element("div", { class: "bar" }, ...parts.map(([name, , field]) => {
    const piece = key(name);
    piece.className = "";
    piece.style.width = `${T.prompt_tokens_asked ? (100 * T[field]) / T.prompt_tokens_asked : 0}%`;
    return piece;
  }));
  const asked = tile("Prompt tokens of completed requests",
    [value("totals.prompt_tokens_asked", whole(T.prompt_tokens_asked)), small("asked")],
    [[bar], parts.flatMap(([name, word, field], i) => [i ? " · " : "", key(name), `${word} `,
      value(`totals.${field}`, whole(T[field])), ` (${percent(T[field], T.prompt_tokens_asked)})`])],
    "goodput_completed_requests" in S ? "two" : "three");
  const tiles = [
    tile("Requests", [value("requests.completed", whole(N.completed)), small(`of ${whole(N.released)} completed`)],
      [[others.length ? others.map(([name, n]) => `${whole(n)} ${name}`).join(", ") : "all ended well"],
        [value("totals.preemptions", whole(T.preemptions)), " preemptions"]]),
    !N.completed ? tile("Duration", ["-"], [["no request completed"]])
      : tile("Duration", [value("summary.duration_ms", fixed(S.duration_ms)), small("ms")],
      [[value("summary.request_throughput_rps", fixed(S.request_throughput_rps)), " requests/s"],
        [value("summary.output_throughput_tok_s", fixed(S.output_throughput_tok_s)), " output tokens/s"]]),
    latency("Time to first token", "ttft"), latency("Time per output token", "tpot"),
    latency("End-to-end latency", "e2e_latency"), asked,
  ];
  if ("goodput_completed_requests" in S)
    tiles.push(tile("Within the SLA", [value("summary.goodput_completed_requests", whole(S.goodput_completed_requests)), small("requests")],
      [[value("summary.goodput_output_throughput_tok_s", fixed(S.goodput_output_throughput_tok_s)), " output tokens/s"]]));
  document.getElementById("tiles").replaceChildren(...tiles);
}

function table(title, id, heads, rows, note) {
  const cells = (row, tag) => element("tr", row.sum ? { class: "sum" } : {}, ...row.map((text) => element(tag, {}, String(text))));
  return element("div", { class: heads.length > 8 ? "table full" : "table", id }, element("h2", {}, title),
    element("table", {}, element("thead", {}, cells(heads, "th")), element("tbody", {}, ...rows.map((row) => cells(row, "td")))),
    ...(note ? [element("p", { class: "note" }, note)] : []));
}

function showTables(model) {
  const report = model.report, S = report.summary;
  const counts = ["requests", "prompt_tokens_asked", "prompt_tokens_from_g1", "prompt_tokens_from_g2", "prompt_tokens_computed",
    "readmission_reused_tokens", "preemptions", "passes", "output_tokens"];
  const ranks = report.workers.map((rank) => [`${rank.pool}-${rank.worker}/${rank.dp_rank}`, ...counts.map((name) => whole(rank[name]))]);
  ranks.push(Object.assign(["sum", ...counts.map((name) => whole(report.totals[name]))], { sum: true }));
  const latencies = [["TTFT", "ttft"], ["TPOT", "tpot"], ["E2E", "e2e_latency"]].map(([word, metric]) =>
    [word, whole(S[`num_${metric}_samples`]), ...["mean", "median", "p90", "p99", "max"]
      .map((part) => (S[`num_${metric}_samples`] ? fixed(S[`${part}_${metric}_ms`]) : "-"))]);
  const inOrder = (a, b) => model.phases.indexOf(a[0]) - model.phases.indexOf(b[0]);
  const parts = Object.entries(report.ttft_parts_mean_ms).sort(inOrder).map(([name, value]) => `${name} ${fixed(value)}`).join(", ");
  const pools = ["capacity", "resident", "used", "stored", "evicted", "loaded"];
  const belief = beliefs(model);
  const kv = model.ranks.map(({ name, kv: k }) => [name, whole(k.events), whole(k.missing), whole(k.repeated), whole(k.clears),
    ...["g1_stored", "g1_removed", "g2_stored", "g2_removed"].map((kind) => whole(k.blocks[kind]))]);
  const view = !belief.looked ? `${model.router.policy} does not look at caches: ${whole(belief.placed)} placements.`
    : `Of ${whole(belief.looked)} placements with an overlap, ${whole(belief.over)} counted on more than was found `
      + `(${whole(belief.over_blocks)} blocks) and ${whole(belief.under)} on less; chosen ranks were believed to hold `
      + `${whole(belief.regret)} blocks less than the best ones.`;
  const definitions = element("details", { class: "table" }, element("summary", {}, "What the figures mean"),
    element("dl", {}, ...Object.entries(report.definitions).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)])));
  document.getElementById("tables").replaceChildren(
    table("Ranks [tokens]", "ranks", ["rank", "requests", "asked", "from G1", "from G2", "computed", "readmitted", "preempted", "passes", "output"], ranks,
      report.workers.some((rank) => rank.pool === "decode") ? "Decode ranks receive prompts from the prefill pool and ask for none." : ""),
    table("Latency [ms]", "latencies", ["", "samples", "mean", "p50", "p90", "p99", "max"], latencies, parts && `Mean TTFT is: ${parts}`),
    ...(report.g2_pools.length ? [table("G2 pools [blocks]", "pools", ["pool", ...pools],
      report.g2_pools.map((pool) => [pool.pool, ...pools.map((name) => whole(pool[`${name}_blocks`]))]))] : []),
    table("Event plane [blocks]", "events",
      ["rank", "events", "missing", "repeated", "clears", "G1 stored", "G1 removed", "G2 stored", "G2 removed"], kv,
      `${view} Routers hear of KV events ${fixed(model.router.kv_event_lag_ms, 1)} ms later. For every rule: g2sim validate ${quoted(model.run)}`),
    definitions);
  const total = (columns, name) => columns.reduce((sum, column) => sum + column[name].reduce((a, b) => a + b, 0), 0);
  const transfers = model.links.reduce((sum, link) => sum + link.amount.length, 0);
  const footer = document.getElementById("footer");
  footer.textContent = `Drawn: ${whole(model.count)} requests, ${whole(total(model.passes, "count"))} passes, `
    + `${whole(model.placements.request.length)} placements, ${whole(transfers)} transfers. Keys: arrows, +, -, 0, Escape. `
    + "The page is complete: it fetches nothing.";
}

const quoted = (text) => (/^[\w./@:+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function showSelection(model, r) {
  const R = model.requests, box = document.getElementById("selection");
  if (r === null) {
    box.replaceChildren(element("h2", {}, "No request selected"),
      element("p", { class: "note" }, "Click a lane or a placement, or type a request's number."));
    return;
  }
  const command = `g2sim explain ${quoted(model.run)} ${r}`;
  const copy = element("button", { type: "button", class: "copy" }, "Copy command");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(box.querySelector("code")); // no clipboard here: leave it marked
    }
  });
  const facts = [["status", model.statuses[R.status[r]]], ["arrived", atTime(R.arrival[r])]];
  const names = [["session", R.session[r] >= 0 && model.sessions[R.session[r]]], ["name", R.label[r]]]
    .filter(([, text]) => text).flatMap(([word, text]) => [element("h3", {}, word), element("div", { class: "name" }, text)]);
  facts.push(["time to first token", ms(R.ttft_us[r])], ["end to end", ms(R.e2e_us[r])], ["mean token gap", ms(R.itl_us[r])],
    ["prompt", `${whole(R.input_tokens[r])} tokens`]);
  if (R.admit_us[r] >= 0)
    facts.push(["from G1", `${whole(R.from_g1[r])} tokens`, "g1"], ["from G2", `${whole(R.from_g2[r])} tokens`, "g2"],
      ["computed", `${whole(R.input_tokens[r] - R.from_g1[r] - R.from_g2[r])} tokens`, "computed"]);
  if (R.output_tokens[r] >= 0) facts.push(["output", `${whole(R.output_tokens[r])} tokens`]);
  if (R.preemptions[r]) facts.push(["preemptions", whole(R.preemptions[r])]);
  const phases = [];
  for (let p = R.first[r]; p < R.first[r + 1]; p++) {
    const name = model.phases[R.phase[p]], rank = R.phase_rank[p] < 0 ? "" : ` · ${model.ranks[R.phase_rank[p]].name}`;
    if (R.phase_us[p]) phases.push([PHASE_WORDS[name] + rank, ms(R.phase_us[p]), name]);
  }
  const placed = model.placements.request.map((n, i) => (n === r ? i : -1)).filter((i) => i >= 0);
  box.replaceChildren(element("h2", {}, `Request ${r}`), element("p", { class: "note" }, "Why it went this way:"),
    element("code", { id: "explain" }, command), copy, rowsTable(facts), ...names,
    element("h3", {}, "Its time"), rowsTable(phases),
    ...placed.flatMap((i) => [element("h3", {}, `Placed on ${model.ranks[model.placements.rank[i]].name}`), rowsTable(model.placementRows(i))]));
}
