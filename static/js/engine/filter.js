// The filter box: `state:waiting prompt>512 preempted -source:chat r-71`. All terms must hold.

const NUMBERS = {
  prompt: (row) => row.num_prompt_tokens,
  output: (row) => row.num_output_tokens,
  computed: (row) => row.num_computed_tokens,
  cached: (row) => row.num_cached_tokens,
  blocks: (row) => row.num_blocks,
  shared: (row) => row.num_shared_blocks,
  preemptions: (row) => row.num_preemptions,
  priority: (row) => row.priority,
  age: (row, now) => now - row.arrival_unix,
};
const WORDS = {
  preempted: (row) => row.num_preemptions > 0,
  shared: (row) => row.num_shared_blocks > 0,
  cached: (row) => row.num_cached_tokens > 0,
};
const COMPARE = {
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  "=": (a, b) => a === b,
};
const STATES = ["waiting", "running", "preempted"];

/**
 * @param {string} text
 * @returns {{isEmpty: boolean, error: string|null, matches: (row: object, now: number) => boolean}}
 */
export function parseFilter(text) {
  const tests = [];
  for (const term of text.trim().split(/\s+/).filter(Boolean)) {
    const negated = term.startsWith("-") && term.length > 1;
    const test = parseTerm(negated ? term.slice(1) : term);
    if (typeof test === "string") return { isEmpty: false, error: test, matches: () => true };
    tests.push(negated ? (row, now) => !test(row, now) : test);
  }
  return {
    isEmpty: tests.length === 0,
    error: null,
    matches: (row, now) => tests.every((test) => test(row, now)),
  };
}

function parseTerm(term) {
  const comparison = /^([a-z_]+)(>=|<=|>|<|=)(.*)$/i.exec(term);
  if (comparison) {
    const [, name, operator, raw] = comparison;
    const read = NUMBERS[name.toLowerCase()];
    if (!read) return `no number called “${name}”; there is ${Object.keys(NUMBERS).join(", ")}`;
    const wanted = Number(raw);
    if (raw === "" || Number.isNaN(wanted)) return `“${name}${operator}” wants a number`;
    return (row, now) => COMPARE[operator](read(row, now), wanted);
  }
  const pair = /^([a-z_]+):(.*)$/i.exec(term);
  if (pair) {
    const [, name, raw] = pair;
    const wanted = raw.toLowerCase();
    if (name === "state" || name === "status") {
      if (!STATES.some((state) => wanted && state.startsWith(wanted))) return `state: is one of ${STATES.join(", ")}`;
      return (row) => row.status.toLowerCase().startsWith(wanted);
    }
    if (name === "source") return (row) => String(row.source).toLowerCase().startsWith(wanted);
    if (name === "id") return (row) => row.id.toLowerCase().includes(wanted);
    return `no field called “${name}”; there is state, source, id`;
  }
  const word = WORDS[term.toLowerCase()];
  if (word) return word;
  const needle = term.toLowerCase();
  return (row) => row.id.toLowerCase().includes(needle);
}
