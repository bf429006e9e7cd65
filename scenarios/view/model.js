// The data of the page: decoded, with differences added up, and looked at by time. Times are microseconds.

async function decode(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function addUp(differences) {
  const values = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < differences.length; i++) values[i] = sum += differences[i];
  return values;
}

function plus(starts, lengths) {
  return starts.map((start, i) => start + lengths[i]);
}

function makeModel(data) {
  const requests = data.requests, count = requests.status.length;
  requests.arrival = addUp(requests.d_arrival_us);
  requests.first = new Uint32Array(count + 1); // place of its first phase
  requests.until = new Float64Array(count); // end, or the end of the log
  const begin = new Float64Array(requests.phase.length), end = new Float64Array(requests.phase.length);
  for (let r = 0, p = 0; r < count; r++) {
    let at = requests.phase_start_us[r];
    for (let k = 0; k < requests.phase_count[r]; k++, p++) {
      begin[p] = at;
      end[p] = at += requests.phase_us[p];
    }
    requests.first[r + 1] = p;
    requests.until[r] = at;
  }
  requests.begin = begin;
  requests.end = end;
  for (const passes of data.passes) {
    passes.start = addUp(passes.d_start);
    passes.stop = plus(passes.start, passes.length);
  }
  for (const link of data.links) {
    link.start = addUp(link.d_start);
    link.stop = plus(link.start, link.length);
  }
  for (const level of [...data.g1, ...data.g2]) {
    level.at = addUp(level.d_at);
    level.blocks = addUp(level.d_blocks);
    if (level.d_used) level.used = addUp(level.d_used);
  }
  for (const changes of Object.values(data.kv)) changes.at = addUp(changes.d_at);
  data.placements.time = addUp(data.placements.at);
  data.total = Math.max(data.end_us, 1);
  data.count = count;
  return data;
}

// Place of the last value <= x in an ascending column, -1 if there is none.
function lastUpTo(column, x) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// A value a pixel column: what of a stretch falls on each, times weight. Stretches without length count where they are.
function spread(pixels, view, start, end, weight) {
  const scale = pixels.length / (view.to - view.from);
  const a = (start - view.from) * scale, b = (end - view.from) * scale;
  if (b < 0 || a >= pixels.length) return;
  if (a === b) {
    pixels[Math.floor(a)] += weight; // all of it at one instant
    return;
  }
  const density = weight / (b - a);
  const from = Math.max(a, 0), to = Math.min(b, pixels.length);
  const first = Math.floor(from), last = Math.min(Math.floor(to), pixels.length - 1);
  if (first === last) {
    pixels[first] += density * (to - from);
    return;
  }
  pixels[first] += density * (first + 1 - from);
  for (let x = first + 1; x < last; x++) pixels[x] += density;
  pixels[last] += density * (to - last);
}

// Text ---------------------------------------------------------------------------------------------------------------

const whole = (n) => n.toLocaleString("en-US");
const fixed = (x, digits = 3) =>
  x.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (part, all) => (all ? `${fixed((100 * part) / all, 1)} %` : "-");
const ms = (us) => (us < 0 ? "-" : `${fixed(us / 1000)} ms`);
const atTime = (us) => `${fixed(us / 1000)} ms`;

function amount(x, unit) {
  const sizes = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [size, letter] = sizes.find(([s]) => Math.abs(x) >= s) || [1, ""];
  const value = x / size;
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toPrecision(2)}${letter}${unit ? ` ${unit}` : ""}`;
}

function bytes(count) {
  const sizes = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  const [size, unit] = sizes.find(([s]) => count >= s) || [1, "B"];
  return `${fixed(count / size, size === 1 ? 0 : 2)} ${unit}`;
}

const PHASE_WORDS = {
  router: "waits in router", queue: "queue", host_load: "restore from G2", restored_wait: "restored, waits",
  prefill: "prefill", reservation: "reservation", transfer: "hand-off transfer", decode_queue: "decode queue",
  decode: "decode", preempted: "preempted",
};
