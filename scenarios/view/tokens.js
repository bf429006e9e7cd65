// The charts that count over intervals: where prompts came from, placements, KV events.

const BAR = 6; // pixels of one bar
const DOTS_MOST = 2000; // placements that are drawn one by one

function tokenCharts(model, state, { colour, stack, scaleLine, label }) {
  const R = model.requests, P = model.placements, COMPLETED = model.statuses.indexOf("completed");
  const bars = (plot) => Math.ceil(plot.width / BAR);
  const barOf = (us, plot) => Math.floor(((us - state.view.from) / (state.view.to - state.view.from)) * (plot.width / BAR));

  // -- hits by tier: the report's prompt tokens, by when the request was first admitted

  let tiers = [];
  function countTiers(plot) {
    tiers = [0, 1, 2].map(() => new Float64Array(bars(plot)));
    for (let r = 0; r < model.count; r++) {
      if (R.status[r] !== COMPLETED || R.admit_us[r] < state.view.from || R.admit_us[r] > state.view.to) continue;
      const bar = Math.min(barOf(R.admit_us[r], plot), bars(plot) - 1);
      tiers[0][bar] += R.from_g1[r];
      tiers[1][bar] += R.from_g2[r];
      tiers[2][bar] += R.input_tokens[r] - R.from_g1[r] - R.from_g2[r];
    }
  }
  const tierNames = [["g1", "from G1"], ["g2", "from G2"], ["computed", "computed"]];
  const hits = {
    id: "hits", title: "Prompt tokens by tier", legend: tierNames,
    note: "of completed requests, at their first admission", height: () => 120,
    draw(ctx, plot) {
      countTiers(plot);
      let most = 1;
      for (let b = 0; b < tiers[0].length; b++) most = Math.max(most, tiers[0][b] + tiers[1][b] + tiers[2][b]);
      scaleLine(ctx, plot, 4, `${amount(most, "")} tokens`);
      stack(ctx, plot, tiers.map((values, i) => [values, tierNames[i][0]]), plot.height, (plot.height - 4) / most, BAR);
    },
    hover(at, plot) {
      const b = barOf(at.us, plot), sum = tiers[0][b] + tiers[1][b] + tiers[2][b];
      if (!(sum > 0)) return null;
      return ["prompt tokens admitted here", tierNames.map(([name, word], i) =>
        [word, `${whole(tiers[i][b])} (${percent(tiers[i][b], sum)})`, name])];
    },
  };

  // -- placements: overlap in percent of the blocks that a prompt can reuse

  const share = (blocks, i) => (blocks < 0 ? -1 : P.usable[i] ? Math.min(1, blocks / P.usable[i]) : 0);
  const looks = P.overlap.some((blocks) => blocks >= 0);
  const yOf = (part, plot) => 8 + (1 - part) * (plot.height - 16);

  // Of more placements than fit as dots: for each bar the sorted shares of each kind.
  let bands = null;
  const quantile = (sorted, q) => sorted[Math.round((sorted.length - 1) * q)];
  function drawBands(ctx, plot, from, to) {
    bands = Array.from({ length: bars(plot) }, () => ({ best: [], believed: [], found: [] }));
    for (let i = from; i <= to; i++)
      for (const [name, blocks] of spotsOf(i)) {
        const bar = bands[barOf(P.time[i], plot)];
        if (blocks >= 0 && bar) bar[name].push(share(blocks, i));
      }
    for (const bar of bands) for (const list of Object.values(bar)) list.sort((a, b) => a - b);
    ctx.fillStyle = colour("found");
    ctx.globalAlpha = 0.2;
    bands.forEach(({ found }, b) => {
      const top = yOf(quantile(found, 0.9), plot), foot = yOf(quantile(found, 0.1), plot);
      if (found.length) ctx.fillRect(plot.left + b * BAR, top, BAR, Math.max(1, foot - top));
    });
    ctx.globalAlpha = 1;
    for (const name of ["best", "believed", "found"]) {
      ctx.fillStyle = colour(name);
      bands.forEach((bar, b) => {
        if (bar[name].length) ctx.fillRect(plot.left + b * BAR, yOf(quantile(bar[name], 0.5), plot) - 1, BAR, 2);
      });
    }
  }
  function bandRows(bar) {
    const rows = [["placements", whole(Math.max(...Object.values(bar).map((list) => list.length)))]];
    for (const [name, word] of [["found", "found, median"], ["believed", "counted on, median"], ["best", "best rank's, median"]])
      if (bar[name].length) rows.push([word, percent(quantile(bar[name], 0.5), 1), name]);
    return rows;
  }

  const spotsOf = (i) => [["best", P.best[i]], ["believed", P.overlap[i]], ["found", P.found[i]]];
  const placements = {
    id: "placements", title: "Placements and their overlap",
    legend: [["found", "found at admission (G1 + G2)", "dot"],
      ...(looks ? [["believed", "counted on by the router", "ring"], ["best", "best rank's", "dash"]] : [])],
    note: () => `${model.router.policy}${looks ? "" : " does not look at caches"}; in % of the prompt's blocks`
      + (bands ? "; lines: medians, band: the middle 80 % of what was found" : ""), height: () => 136,
    draw(ctx, plot) {
      scaleLine(ctx, plot, yOf(1, plot), "100 %");
      scaleLine(ctx, plot, yOf(0.5, plot), "50 %");
      scaleLine(ctx, plot, yOf(0, plot), "0 %");
      const from = Math.max(0, lastUpTo(P.time, state.view.from - 1)), to = lastUpTo(P.time, state.view.to);
      if (to - from > DOTS_MOST) return drawBands(ctx, plot, from, to);
      bands = null;
      const scale = plot.width / (state.view.to - state.view.from);
      ctx.globalAlpha = 0.9;
      for (const kind of [0, 1, 2])
        for (let i = from; i <= to; i++) {
          const [name, blocks] = spotsOf(i)[kind];
          const x = plot.left + (P.time[i] - state.view.from) * scale;
          if (blocks < 0 || x < plot.left) continue;
          const y = yOf(share(blocks, i), plot);
          ctx.fillStyle = ctx.strokeStyle = colour(name);
          if (kind === 0) ctx.fillRect(x - 6, y - 1, 12, 2);
          else {
            ctx.beginPath();
            ctx.arc(x, y, kind === 1 ? 5 : 3, 0, 7);
            if (kind === 1) ctx.stroke(); else ctx.fill();
          }
        }
      ctx.globalAlpha = 1;
    },
    at(at, plot) {
      if (bands) return undefined;
      const perPixel = (state.view.to - state.view.from) / plot.width;
      let best, distance = 14;
      const to = lastUpTo(P.time, at.us + 14 * perPixel);
      for (let i = Math.max(0, lastUpTo(P.time, at.us - 14 * perPixel)); i <= to; i++)
        for (const [, blocks] of spotsOf(i)) {
          if (blocks < 0) continue;
          const d = Math.hypot((P.time[i] - at.us) / perPixel, yOf(share(blocks, i), plot) - at.y);
          if (d < distance) [best, distance] = [i, d];
        }
      return best;
    },
    hover(at, plot) {
      const bar = bands?.[barOf(at.us, plot)];
      if (bar) return ["placements here", bandRows(bar)];
      const i = placements.at(at, plot);
      if (i === undefined) return null;
      return [`request ${P.request[i]} placed on ${model.ranks[P.rank[i]].name}`, placementRows(i)];
    },
    click(at, plot) {
      const i = placements.at(at, plot);
      return i === undefined ? undefined : P.request[i];
    },
  };

  function placementRows(i) {
    const blocks = (n) => `${whole(n)} of ${whole(P.whole[i])} whole blocks`;
    const rows = [["placed", atTime(P.time[i])]];
    if (P.waited[i]) rows.push(["waited in router", ms(P.waited[i])]);
    if (P.found[i] >= 0) rows.push(["found at admission", blocks(P.found[i]), "found"]);
    if (P.overlap[i] >= 0) rows.push(["counted on", blocks(P.overlap[i]), "believed"]);
    if (P.best[i] >= 0) rows.push(["best rank's", blocks(P.best[i]), "best"]);
    if (P.usable[i] < P.whole[i]) rows.push(["always computed", "1 block: the last token's"]);
    return rows;
  }

  // -- event plane

  const kinds = [["g1_stored", "g1", 1, "stored in G1"], ["g2_stored", "g2", 1, "stored in G2"],
    ["g1_removed", "g1", -1, "removed from G1"], ["g2_removed", "g2", -1, "removed from G2"]];
  let counted = {};
  const kv = {
    id: "kv", title: "Event plane: KV events", legend: [["g1", "G1 blocks"], ["g2", "G2 blocks"]],
    note: `stored upwards, removed downwards; ${eventHealth(model)}`, height: () => 120,
    draw(ctx, plot) {
      counted = {};
      let most = 1;
      for (const [kind] of kinds) {
        const all = (counted[kind] = new Float64Array(bars(plot)));
        const { at, blocks } = model.kv[kind];
        for (let i = lastUpTo(at, state.view.from - 1) + 1; i < at.length && at[i] <= state.view.to; i++)
          all[Math.min(barOf(at[i], plot), all.length - 1)] += blocks[i];
      }
      for (let b = 0; b < bars(plot); b++)
        most = Math.max(most, counted.g1_stored[b] + counted.g2_stored[b], counted.g1_removed[b] + counted.g2_removed[b]);
      const middle = plot.height / 2, scale = (middle - 6) / most;
      scaleLine(ctx, plot, 6, `${amount(most, "")} blocks`);
      scaleLine(ctx, plot, middle, "0");
      scaleLine(ctx, plot, plot.height - 6, `${amount(most, "")} blocks`);
      for (const sign of [1, -1])
        stack(ctx, plot, kinds.filter((k) => k[2] === sign).map(([k, name]) => [counted[k], name]), middle, scale, BAR, sign);
    },
    hover(at, plot) {
      const b = barOf(at.us, plot);
      return ["KV events around here", kinds.map(([kind, name, , word]) => [word, `${whole(counted[kind][b])} blocks`, name])];
    },
  };
  model.placementRows = placementRows;
  return [hits, placements, kv];
}

// How the router's view of caches compares with what was found, over all placements with both.
function beliefs(model) {
  const P = model.placements, out = { placed: P.request.length, looked: 0, over: 0, under: 0, over_blocks: 0, regret: 0 };
  for (let i = 0; i < P.request.length; i++) {
    if (P.overlap[i] < 0) continue;
    if (P.best[i] >= 0) out.regret += P.best[i] - P.overlap[i];
    if (P.found[i] < 0) continue;
    out.looked++;
    const counted = Math.min(P.overlap[i], P.usable[i]); // the last token of a prompt is always computed
    out.over += counted > P.found[i];
    out.under += counted < P.found[i];
    out.over_blocks += Math.max(0, counted - P.found[i]);
  }
  return out;
}

function eventHealth(model) {
  const sum = (name) => model.ranks.reduce((all, rank) => all + rank.kv[name], 0);
  return `${whole(sum("events"))} events, ${whole(sum("missing"))} missing, ${whole(sum("repeated"))} repeated; `
    + `routers hear of them ${fixed(model.router.kv_event_lag_ms, 1)} ms later`;
}
