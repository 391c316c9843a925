// The path of a micro-batch that forks or joins: stages as boxes in the colour of their rank, edges from left to right.

// Per stage of a route, how many edges lie on the longest way to it.
function pathDepths(route, edges) {
  const depth = new Map(route.map((s) => [s, 0]));
  for (const s of route) { // stages are listed so that every edge leads forward
    for (const [a, b] of edges) if (a === s) depth.set(b, Math.max(depth.get(b), depth.get(a) + 1));
  }
  return depth;
}

function stageWords(entry, s) {
  const shard = (entry.shards ?? [])[s];
  return `stage ${s}, ${layersOf(entry, s).trim()}${shard ? `, shard ${shard[0] + 1} of ${shard[1]}` : ""}, rank ${entry.stages[s][2]}`;
}

function pathPicture(entry, route, number, width) {
  const edges = entry.edges[number], depth = pathDepths(route, edges);
  const columns = [];
  for (const s of route) (columns[depth.get(s)] ??= []).push(s);
  const rows = Math.max(...columns.map((column) => column.length));
  const high = 24, between = 8, least = 30, gap = Math.min(34, Math.max(10, width / columns.length / 3));
  const wide = Math.max((width - gap * (columns.length - 1)) / columns.length, least);
  const whole = wide * columns.length + gap * (columns.length - 1), tall = rows * (high + between);
  const svg = shape("svg", {
    viewBox: `0 0 ${Math.max(width, whole)} ${tall + 18}`, role: "img", class: "strip path",
    "aria-label": `${entry.label}: path ${number}: ` + edges.map(([a, b]) => `stage ${a} to stage ${b}`).join(", "),
  });
  const place = new Map();
  columns.forEach((column, c) => column.forEach((s, k) => {
    const top = (tall - column.length * (high + between) + between) / 2;
    place.set(s, [c * (wide + gap), top + k * (high + between)]);
  }));
  for (const [a, b] of edges) {
    const [ax, ay] = place.get(a), [bx, by] = place.get(b), x1 = ax + wide, y1 = ay + high / 2, y2 = by + high / 2;
    const bend = (bx - x1) / 2;
    svg.append(shape("path", { class: "edge", fill: "none", stroke: "currentColor", "stroke-opacity": 0.45,
      d: `M${x1},${y1}C${x1 + bend},${y1} ${bx - bend},${y2} ${bx},${y2}` }));
  }
  for (const s of route) {
    const [x, y] = place.get(s), rank = entry.stages[s][2], shard = (entry.shards ?? [])[s];
    const group = shape("g");
    group.append(shape("title", {}, stageWords(entry, s)),
      shape("rect", { x, y, width: wide, height: high, rx: 2, fill: RANK_COLOURS[rank % RANK_COLOURS.length] }));
    const part = shard ? ` ${shard[0] + 1}/${shard[1]}` : "";
    const text = [`rank ${rank}${part}`, `${rank}${part}`, String(rank)].find((words) => words.length * 7.4 + 4 < wide);
    if (text) group.append(shape("text", { x: x + wide / 2, y: y + high / 2 + 4.5, "text-anchor": "middle", class: "on" }, text));
    svg.append(group);
  }
  columns.forEach((column, c) => {
    const [first, stop] = entry.stages[column[0]], same = column.every((s) => entry.stages[s][0] === first && entry.stages[s][1] === stop);
    const words = [stop - first > 1 ? `layers ${first}–${stop - 1}` : `layer ${first}`, stop - first > 1 ? `${first}–${stop - 1}` : `${first}`];
    const text = same && words.find((line) => line.length * 6.4 < wide + gap);
    if (text) svg.append(shape("text", { x: c * (wide + gap) + wide / 2, y: tall + 12, "text-anchor": "middle", class: "letter" }, text));
  });
  const name = entry.routes.length > 1 ? `${caption(entry)}, path ${number}` : caption(entry);
  return element("figure", {}, element("figcaption", {}, name), svg);
}
