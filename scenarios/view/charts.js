// The charts: each draws the visible stretch of the run into a canvas and tells what lies under the pointer.

const GUTTER = 118, RIGHT = 10, AXIS = 20; // pixels left and right of the plot, and below it
const LANES_HEIGHT = 440, LANE_MAX = 16, LANE_LEAST = 3, LANE_LABEL = 12; // pixels
const TOKENS_MOST = 500; // of more requests, first tokens are not marked
const LANES_PER_PIXEL = 4; // more lanes than this are thinned out

function makeCharts(model, state, colour) {
  const R = model.requests;
  const limitOf = (rows, most, least, all) => Math.max(least, Math.min(most, Math.floor(all / Math.max(rows, 1))));
  const rankRow = limitOf(model.ranks.length, 26, 5, 360);

  // -- parts that all charts use

  function label(ctx, text, y, size, name = "") {
    ctx.fillStyle = colour("ink");
    ctx.font = `${Math.max(10, Math.min(12, size + 1))}px system-ui, "DejaVu Sans", sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillText(shortened(ctx, text, name), 2, y);
  }

  // Names a row; of rows too low for a name each, as many as have room.
  function nameRow(ctx, k, row, room, name) {
    if (k % Math.ceil(LANE_LABEL / row) === 0) label(ctx, "", Math.max(k * row + room / 2, 6), room, name);
  }

  // Text that fits beside the plot: names differ at their ends, so what is left out comes before those.
  function shortened(ctx, text, name) {
    const fits = (shown) => ctx.measureText(shown).width <= GUTTER - 8;
    if (fits(text + name)) return text + name;
    let from = 1;
    while (from < name.length && !fits(`${text}…${name.slice(from)}`)) from++;
    return `${text}…${name.slice(from)}`;
  }

  function scaleLine(ctx, plot, y, text) {
    ctx.strokeStyle = colour("line");
    ctx.beginPath();
    ctx.moveTo(plot.left, Math.round(y) + 0.5);
    ctx.lineTo(plot.left + plot.width, Math.round(y) + 0.5);
    ctx.stroke();
    ctx.fillStyle = colour("soft");
    ctx.font = '11px system-ui, "DejaVu Sans", sans-serif';
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    ctx.fillText(text, plot.left - 6, Math.max(6, y));
  }

  // Stacked columns of one pixel (or of `step` pixels) from a base line upwards; `sign` -1 draws downwards.
  function stack(ctx, plot, layers, base, scale, step = 1, sign = 1) {
    for (let x = 0; x < plot.width; x += step) {
      let level = 0;
      for (const [values, name] of layers) {
        const height = values[x / step] * scale;
        if (height <= 0) continue;
        ctx.fillStyle = colour(name);
        const top = sign > 0 ? base - level - height : base + level;
        ctx.fillRect(plot.left + x, top, step > 2 ? step - 1 : step, Math.max(height, 0.75));
        level += height;
      }
    }
  }

  const visible = (start, end, view) => end >= view.from && start <= view.to;

  // -- requests in flight

  function inFlight(view, width) {
    const layers = model.phases.map(() => new Float64Array(width));
    const perPixel = (view.to - view.from) / width;
    for (let p = 0; p < R.phase.length; p++) {
      const length = R.end[p] - R.begin[p];
      if (length > 0 && visible(R.begin[p], R.end[p], view))
        spread(layers[R.phase[p]], view, R.begin[p], R.end[p], length / perPixel);
    }
    return layers;
  }

  const used = new Set(R.phase.filter((_, p) => R.phase_us[p] > 0));
  const phaseLegend = model.phases
    .map((name, i) => [name, i]).filter(([, i]) => used.has(i)).map(([name]) => [name, PHASE_WORDS[name]]);

  let flight = null; // the whole run, drawn on every zoom
  const overview = {
    id: "overview", title: "Requests in flight", note: "whole run, by what they wait for or do; drag to zoom",
    legend: phaseLegend, whole: true, height: () => 92,
    draw(ctx, plot) {
      const all = { from: 0, to: model.total };
      if (!flight || flight[0].length !== plot.width) flight = inFlight(all, plot.width);
      let most = 1;
      for (let x = 0; x < plot.width; x++) most = Math.max(most, flight.reduce((sum, layer) => sum + layer[x], 0));
      most = Math.ceil(most - 1e-6);
      scaleLine(ctx, plot, 4, whole(most));
      stack(ctx, plot, flight.map((layer, i) => [layer, model.phases[i]]), plot.height, (plot.height - 4) / most);
      const a = plot.left + (state.view.from / model.total) * plot.width;
      const b = plot.left + (state.view.to / model.total) * plot.width;
      if (b - a < plot.width - 1) {
        ctx.fillStyle = colour("ground");
        ctx.globalAlpha = 0.6;
        ctx.fillRect(plot.left, 0, a - plot.left, plot.height);
        ctx.fillRect(b, 0, plot.left + plot.width - b, plot.height);
        ctx.globalAlpha = 1;
        ctx.strokeStyle = colour("mark");
        ctx.strokeRect(a + 0.5, 0.5, Math.max(b - a - 1, 1), plot.height - 1);
      }
    },
    hover(at, plot) {
      const x = Math.min(plot.width - 1, Math.floor((at.us / model.total) * plot.width));
      const rows = model.phases.map((name, i) => [PHASE_WORDS[name], flight[i][x], name]).filter((row) => row[1] > 0.005);
      return ["requests in flight", rows.map(([word, n, name]) => [word, fixed(n, n < 10 ? 2 : 1), name])];
    },
  };

  // -- lanes: a list of requests each. With room for it one request a lane, else a lane takes the next one when it is free.

  const startOf = (r) => Math.min(R.arrival[r], R.phase_start_us[r]);
  const groups = { arrival: () => 0, rank: (r) => R.rank[r], session: (r) => R.session[r], ttft: null };
  const groupName = { arrival: () => "", rank: (r) => (R.rank[r] < 0 ? "no rank" : model.ranks[R.rank[r]].name),
    session: (r) => (R.session[r] < 0 ? "" : model.sessions[R.session[r]]) };
  let shown = { lanes: [], pitch: LANE_MAX, all: 0, step: 1, packed: false };

  function pickLanes() {
    const rows = [], group = groups[state.order];
    for (let r = 0; r < model.count; r++) if (visible(startOf(r), R.until[r], state.view)) rows.push(r);
    if (group) rows.sort((a, b) => group(a) - group(b) || startOf(a) - startOf(b) || a - b);
    else rows.sort((a, b) => R.ttft_us[b] - R.ttft_us[a] || a - b);
    const packed = group !== null && rows.length * LANE_LEAST > LANES_HEIGHT;
    const every = packed ? pack(rows, group) : rows.map((r) => [r]);
    const step = Math.max(1, Math.ceil(every.length / (LANES_HEIGHT * LANES_PER_PIXEL)));
    const lanes = step === 1 ? every : every.filter((_, i) => i % step === 0);
    shown = { lanes, pitch: Math.min(LANE_MAX, LANES_HEIGHT / Math.max(lanes.length, 1)), all: rows.length, step, packed };
  }

  // Puts rows, which are sorted by group and start, on the lowest lane of their group that is free.
  function pack(rows, group) {
    const lanes = [];
    for (let i = 0; i < rows.length;) {
      const base = lanes.length, members = [];
      for (const key = group(rows[i]); i < rows.length && group(rows[i]) === key; i++) members.push(rows[i]);
      const byEnd = [...members].sort((a, b) => R.until[a] - R.until[b]), lane = new Map(), free = new Set();
      let done = 0, lowest = base;
      for (const r of members) {
        for (; done < byEnd.length && R.until[byEnd[done]] <= startOf(r) && lane.has(byEnd[done]); done++) {
          free.add(lane.get(byEnd[done]));
          lowest = Math.min(lowest, lane.get(byEnd[done]));
        }
        while (lowest < lanes.length && !free.has(lowest)) lowest++;
        if (lowest === lanes.length) lanes.push([]);
        free.delete(lowest);
        lane.set(r, lowest);
        lanes[lowest].push(r);
      }
    }
    return lanes;
  }

  // Phases that are worth seeing and often shorter than a pixel: drawn last, and no narrower than this.
  const RARE = new Set(["host_load", "preempted"].map((name) => model.phases.indexOf(name))), RARE_LEAST = 3;

  const nameOf = (r) => {
    const session = R.session[r] >= 0 ? model.sessions[R.session[r]] : "";
    return [session, R.label[r]].filter(Boolean).join(" · ");
  };

  function labelLanes(ctx, plot, bar) {
    const { lanes, pitch, packed } = shown;
    let free = 0; // where the next label has room
    lanes.forEach((lane, i) => {
      const text = packed ? groupName[state.order](lane[0]) : nameOf(lane[0]);
      const isFirst = !packed || i === 0 || text !== groupName[state.order](lanes[i - 1][0]);
      const y = i * pitch + Math.max(bar / 2, 6);
      if (!isFirst || y < free || y > plot.height) return;
      label(ctx, packed ? "" : `#${lane[0]} `, y, 10, text);
      free = y + LANE_LABEL;
    });
  }

  const lanes = {
    id: "lanes", title: "Request lanes", legend: [...phaseLegend, ["ink", "first token", "dash"]],
    note: () => {
      const { lanes: list, all, step, packed } = shown;
      return `${whole(all)} request${all === 1 ? "" : "s"} here${packed ? `, packed into ${whole(list.length * step)} lanes` : ""}`
        + `${step > 1 ? `, every ${step}th lane drawn` : ""}${packed ? ": zoom in for one lane each" : ""}`;
    },
    height() {
      pickLanes();
      return Math.max(36, Math.round(shown.lanes.length * shown.pitch));
    },
    draw(ctx, plot) {
      const { pitch } = shown, bar = pitch >= 5 ? pitch - 2 : Math.max(pitch, 1);
      const scale = plot.width / (state.view.to - state.view.from);
      const xOf = (us) => plot.left + (us - state.view.from) * scale;
      const boxes = model.phases.map(() => []), tokens = [];
      shown.lanes.forEach((lane, i) => {
        for (const r of lane) {
          for (let p = R.first[r]; p < R.first[r + 1]; p++) {
            if (!visible(R.begin[p], R.end[p], state.view)) continue;
            const a = Math.max(xOf(R.begin[p]), plot.left), b = Math.min(xOf(R.end[p]), plot.left + plot.width);
            if (b <= a) continue;
            const least = shown.packed ? 0.1 : RARE.has(R.phase[p]) ? RARE_LEAST : 0.6;
            boxes[R.phase[p]].push(Math.max(plot.left, Math.min(a, b - least)), i * pitch, Math.max(b - a, least));
          }
          const token = xOf(R.arrival[r] + R.ttft_us[r]);
          if (shown.all <= TOKENS_MOST && R.ttft_us[r] >= 0 && pitch >= 5 && token >= plot.left && token <= plot.left + plot.width)
            tokens.push(token - 1, i * pitch - 0.5);
        }
      });
      const order = [...boxes.keys()].sort((one, other) => RARE.has(one) - RARE.has(other));
      order.forEach((phase) => {
        const list = boxes[phase];
        ctx.fillStyle = colour(model.phases[phase]);
        for (let k = 0; k < list.length; k += 3) ctx.fillRect(list[k], list[k + 1], list[k + 2], bar);
      });
      ctx.fillStyle = colour("ink");
      for (let k = 0; k < tokens.length; k += 2) ctx.fillRect(tokens[k], tokens[k + 1], 2, bar + 1);
      const r = state.selected, chosen = r === null ? -1 : shown.lanes.findIndex((lane) => lane.includes(r));
      if (chosen >= 0) {
        const a = shown.packed ? Math.max(xOf(startOf(r)) - 2, plot.left) : plot.left + 1;
        const b = shown.packed ? Math.min(xOf(R.until[r]) + 2, plot.left + plot.width) : plot.left + plot.width - 1;
        ctx.strokeStyle = colour("mark");
        ctx.lineWidth = 2;
        ctx.strokeRect(a, chosen * pitch - 1, Math.max(b - a, 5), Math.max(bar, 3) + 2);
        ctx.lineWidth = 1;
      }
      labelLanes(ctx, plot, bar);
    },
    at(at, plot) {
      const lane = shown.lanes[Math.floor(at.y / shown.pitch)] || [];
      const slack = shown.packed ? (2 * (state.view.to - state.view.from)) / plot.width : Infinity;
      return lane.find((r) => at.us >= startOf(r) - slack && at.us <= R.until[r] + slack);
    },
    hover(at, plot) {
      const r = lanes.at(at, plot);
      if (r === undefined) return null;
      const rows = [], wide = shown.packed ? 0 : (RARE_LEAST * (state.view.to - state.view.from)) / plot.width;
      for (let p = R.first[r]; p < R.first[r + 1]; p++)
        if (at.us >= Math.min(R.begin[p], RARE.has(R.phase[p]) ? R.end[p] - wide : R.begin[p]) && at.us <= R.end[p] && R.end[p] > R.begin[p]) {
          const rank = R.phase_rank[p] < 0 ? "" : ` on ${model.ranks[R.phase_rank[p]].name}`;
          rows.push([PHASE_WORDS[model.phases[R.phase[p]]] + rank, ms(R.phase_us[p]), model.phases[R.phase[p]]]);
        }
      rows.push(["arrived", atTime(R.arrival[r])], ["time to first token", ms(R.ttft_us[r])]);
      const output = R.output_tokens[r] < 0 ? "?" : whole(R.output_tokens[r]);
      rows.push(["prompt / output", `${whole(R.input_tokens[r])} / ${output} tokens`]);
      if (R.admit_us[r] >= 0) rows.push(["from G1 / G2", `${whole(R.from_g1[r])} / ${whole(R.from_g2[r])} tokens`]);
      rows.push(["status", model.statuses[R.status[r]]]);
      return [`request ${r} ${nameOf(r)}`, rows];
    },
    click: (at, plot) => lanes.at(at, plot),
  };

  // -- passes

  const passes = {
    id: "passes", title: "Passes by rank", legend: [["prefill", "prefill tokens"], ["decode", "decode tokens"]],
    note: "height: share of the time a pass runs; colour: what its tokens are"
      + (model.pass_group > 1 ? `; ${model.pass_group} neighbours drawn as one` : ""),
    height: () => Math.max(36, rankRow * model.ranks.length),
    draw(ctx, plot) {
      const perPixel = (state.view.to - state.view.from) / plot.width, room = rankRow > 8 ? rankRow - 4 : rankRow - 1;
      model.passes.forEach((P, k) => {
        const base = k * rankRow + room, prefill = new Float64Array(plot.width), decode = new Float64Array(plot.width);
        ctx.fillStyle = colour("grid");
        ctx.fillRect(plot.left, k * rankRow, plot.width, room);
        for (let i = Math.max(0, lastUpTo(P.start, state.view.from)); i < P.start.length && P.start[i] <= state.view.to; i++) {
          const share = P.tokens[i] ? Math.min(1, P.prefill[i] / P.tokens[i]) : 0, busy = P.busy[i] / perPixel;
          spread(prefill, state.view, P.start[i], P.stop[i], busy * share);
          spread(decode, state.view, P.start[i], P.stop[i], busy * (1 - share));
        }
        stack(ctx, plot, [[prefill, "prefill"], [decode, "decode"]], base, room);
        ctx.fillStyle = colour("card"); // gaps between passes that are wide enough
        for (let i = Math.max(0, lastUpTo(P.start, state.view.from)); i < P.start.length && P.start[i] <= state.view.to; i++)
          if (P.length[i] / perPixel >= 5) ctx.fillRect(plot.left + (P.stop[i] - state.view.from) / perPixel - 0.5, k * rankRow, 1, room);
        nameRow(ctx, k, rankRow, room, model.ranks[k].name);
      });
    },
    hover(at) {
      const k = Math.floor(at.y / rankRow), P = model.passes[k];
      if (!P) return null;
      const i = lastUpTo(P.start, at.us);
      if (i < 0 || P.stop[i] < at.us) return [model.ranks[k].name, [["", "no pass"]]];
      const rows = [["start", atTime(P.start[i])], ["length", ms(P.length[i])]];
      if (P.count[i] > 1) rows.unshift(["passes added up", whole(P.count[i])]);
      rows.push(["prefill tokens", whole(P.prefill[i]), "prefill"], ["scheduled tokens", whole(P.tokens[i])]);
      rows.push(["requests", whole(P.requests[i])], ["tokens made", whole(P.emitted[i]), "decode"]);
      return [`pass on ${model.ranks[k].name}`, rows];
    },
  };

  // -- residency

  // Highest value a pixel column of a level that changes in steps.
  function highest(level, column, plot) {
    const out = new Float64Array(plot.width), perPixel = (state.view.to - state.view.from) / plot.width;
    let i = lastUpTo(level.at, state.view.from), now = i < 0 ? 0 : column[i];
    for (let x = 0; x < plot.width; x++) {
      const stop = state.view.from + (x + 1) * perPixel; // what holds when a column begins counts in it
      let most = now;
      while (i + 1 < level.at.length && level.at[i + 1] <= stop) most = Math.max(most, (now = column[++i]));
      out[x] = most;
    }
    return out;
  }

  const valueAt = (level, column, us) => {
    const i = lastUpTo(level.at, us);
    return i < 0 ? 0 : column[i];
  };

  const g1 = {
    id: "g1", title: "G1 residency", legend: [["g1", "resident blocks"]],
    note: "blocks in GPU memory as the rank's KV events say, against its capacity",
    height: passes.height,
    draw(ctx, plot) {
      const room = rankRow > 8 ? rankRow - 4 : rankRow - 1;
      model.g1.forEach((level, k) => {
        ctx.fillStyle = colour("grid");
        ctx.fillRect(plot.left, k * rankRow, plot.width, room);
        stack(ctx, plot, [[highest(level, level.blocks, plot), "g1"]], k * rankRow + room, room / model.ranks[k].gpu_blocks);
        nameRow(ctx, k, rankRow, room, model.ranks[k].name);
      });
    },
    hover(at) {
      const k = Math.floor(at.y / rankRow), rank = model.ranks[k];
      if (!rank) return null;
      const blocks = valueAt(model.g1[k], model.g1[k].blocks, at.us);
      return [`G1 of ${rank.name}`, [
        ["resident", `${whole(blocks)} blocks`, "g1"], ["capacity", `${whole(rank.gpu_blocks)} blocks`],
        ["full", percent(blocks, rank.gpu_blocks)],
      ]];
    },
  };

  const poolEntry = model.report.g2_pools;
  const poolRow = limitOf(poolEntry.length, 60, 5, 360);
  const g2 = {
    id: "g2", title: "G2 residency", legend: [["g2", "resident blocks"], ["pending", "store under way"]],
    note: "blocks in host memory, against the pool's capacity",
    height: () => Math.max(36, poolRow * poolEntry.length),
    draw(ctx, plot) {
      const room = poolRow > 8 ? poolRow - 4 : poolRow - 1;
      model.g2.forEach((level, k) => {
        ctx.fillStyle = colour("grid");
        ctx.fillRect(plot.left, k * poolRow, plot.width, room);
        const resident = highest(level, level.blocks, plot), all = highest(level, level.used, plot);
        const pending = all.map((value, x) => Math.max(0, value - resident[x]));
        stack(ctx, plot, [[resident, "g2"], [pending, "pending"]], k * poolRow + room, room / poolEntry[k].capacity_blocks);
        nameRow(ctx, k, poolRow, room, level.label);
      });
    },
    hover(at) {
      const k = Math.floor(at.y / poolRow), level = model.g2[k];
      if (!level) return null;
      const blocks = valueAt(level, level.blocks, at.us), all = valueAt(level, level.used, at.us);
      return [`pool ${level.pool}`, [
        ["resident", `${whole(blocks)} blocks`, "g2"], ["store under way", `${whole(all - blocks)} blocks`, "pending"],
        ["capacity", `${whole(poolEntry[k].capacity_blocks)} blocks`], ["full", percent(all, poolEntry[k].capacity_blocks)],
      ]];
    },
  };

  // -- links

  const linkRow = limitOf(model.links.length, 44, 6, 360);
  const linkColours = { store: "queue", load: "host_load", handoff: "transfer" };
  const linkName = (link) => (link.kind === "handoff" ? "hand-off" : `${link.label} ${link.kind}`);
  const unitOf = (link) => (link.bytes_per_unit ? "GB/s" : `${link.unit}/s`);
  const rateOf = (link, units, us) => (units * (link.bytes_per_unit ? link.bytes_per_unit / 1e9 : 1)) / (us / 1e6);

  function linkRates(link, plot) {
    const out = new Float64Array(plot.width), perPixel = (state.view.to - state.view.from) / plot.width;
    for (let i = 0; i < link.start.length; i++)
      if (visible(link.start[i], link.stop[i], state.view)) spread(out, state.view, link.start[i], link.stop[i], link.amount[i]);
    return out.map((units) => rateOf(link, units, perPixel));
  }

  const linkKinds = [["store", "store: G1 to G2"], ["load", "load: G2 to G1"], ["handoff", "hand-off: prefill to decode"]]
    .filter(([kind]) => model.links.some((link) => link.kind === kind));
  const links = {
    id: "links", title: "Link use", legend: linkKinds.map(([kind, word]) => [linkColours[kind], word]),
    note: "mean over each pixel, a transfer's bytes spread evenly over its time; full height: the highest here",
    height: () => Math.max(36, linkRow * model.links.length),
    draw(ctx, plot) {
      const room = linkRow > 8 ? linkRow - 5 : linkRow - 1;
      model.links.forEach((link, k) => {
        const rates = linkRates(link, plot), most = rates.reduce((x, y) => Math.max(x, y), 0);
        ctx.fillStyle = colour("grid");
        ctx.fillRect(plot.left, k * linkRow, plot.width, room);
        if (most > 0) stack(ctx, plot, [[rates, linkColours[link.kind]]], k * linkRow + room, room / most);
        const two = room >= 26, middle = k * linkRow + room / 2;
        if (two) label(ctx, "", middle - 7, room, linkName(link));
        else nameRow(ctx, k, linkRow, room, linkName(link));
        if (two) {
          ctx.fillStyle = colour("soft");
          ctx.font = '11px system-ui, "DejaVu Sans", sans-serif';
          ctx.fillText(`${amount(most, "")}${link.gb_per_s ? ` of ${link.gb_per_s}` : ""} ${unitOf(link)}`, 2, middle + 8);
        }
      });
    },
    hover(at) {
      const link = model.links[Math.floor(at.y / linkRow)];
      if (!link) return null;
      let moving = 0, units = 0, rate = 0;
      for (let i = 0; i < link.start.length; i++)
        if (link.start[i] <= at.us && link.stop[i] >= at.us) {
          moving++;
          units += link.amount[i];
          if (link.length[i]) rate += rateOf(link, link.amount[i], link.length[i]);
        }
      const rows = [["transfers under way", whole(moving)], [link.unit, whole(units)]];
      if (link.bytes_per_unit) rows.push(["bytes", bytes(units * link.bytes_per_unit)]);
      rows.push(["mean rate of these", `${amount(rate, unitOf(link))}`]);
      if (link.gb_per_s) rows.push(["bandwidth", `${link.gb_per_s} GB/s`]);
      return [linkName(link), rows];
    },
  };

  return [overview, lanes, passes, g1, ...(model.g2.length ? [g2] : []), ...(model.links.length ? [links] : []),
    ...tokenCharts(model, state, { colour, stack, scaleLine, label })];
}
