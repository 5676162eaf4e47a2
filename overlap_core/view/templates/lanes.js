"use strict";
// What is drawn, and where: rows of lanes, blocks in typed arrays, finding by time and by name.

const Lanes = (() => {
  const RULER = 22;
  const HEAD = 24;
  const HEIGHTS = { host: 16, compute: 26, group: 22, memory: 30 };
  const GAP = 3;

  function unpack(lane) {
    const count = lane.blocks.length / 4;
    const starts = new Float64Array(count);
    const ends = new Float64Array(count);
    const nodes = new Int32Array(count);
    const kinds = new Uint8Array(count);
    for (let i = 0; i < count; i++) {
      starts[i] = lane.blocks[4 * i];
      ends[i] = lane.blocks[4 * i + 1];
      nodes[i] = lane.blocks[4 * i + 2];
      kinds[i] = lane.blocks[4 * i + 3];
    }
    return { kind: lane.kind, label: lane.label, starts, ends, nodes, kinds, count };
  }

  // Bytes in flight as steps; each holds up to the next one, the last to the end.
  function unpackSteps(order) {
    const count = order.memory.length / 2;
    const starts = Array.from({ length: count }, (_, i) => order.memory[2 * i]);
    const bytes = Array.from({ length: count }, (_, i) => order.memory[2 * i + 1]);
    return { starts, ends: [...starts.slice(1), order.total], bytes, count };
  }

  // Rows from top to bottom; y counts from below the ruler.
  function layOut(data) {
    const rows = [];
    let y = 0;
    for (const rank of data.ranks) {
      for (const order of rank.orders) {
        rows.push({ y, height: HEAD, rank, order, head: true });
        y += HEAD;
        for (const packed of order.lanes) {
          const lane = unpack(packed);
          const height = HEIGHTS[lane.kind];
          rows.push({ y, height, rank, order, lane });
          y += height + GAP;
        }
        rows.push({ y, height: HEIGHTS.memory, rank, order, steps: unpackSteps(order) });
        y += HEIGHTS.memory + GAP;
        y += 4;
      }
      y += 8;
    }
    return { rows, height: y };
  }

  // Index of the first block or step that ends at or after a time; ends never decrease.
  function firstFrom(lane, time) {
    let low = 0;
    let high = lane.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.ends[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function bytesAt(steps, time) {
    const i = steps.starts.findLastIndex((start) => start <= time);
    return i < 0 ? 0 : steps.bytes[i];
  }

  // The block at a time, or the nearest one within `slack`; -1: none.
  function blockAt(lane, time, slack) {
    let best = -1;
    let bestDistance = slack;
    for (let i = firstFrom(lane, time - slack); i < lane.count; i++) {
      if (lane.starts[i] > time + slack) break;
      const distance = Math.max(lane.starts[i] - time, time - lane.ends[i], 0);
      // Of blocks that touch, the one that begins here; empty ones never hide others.
      const wins = distance < bestDistance || (distance === bestDistance && lane.ends[i] > time);
      if (best < 0 ? distance <= slack : wins) {
        best = i;
        bestDistance = distance;
      }
    }
    return best;
  }

  // Matching nodes, one block for each in each order: its longest, on whatever lane.
  function search(rows, text) {
    const wanted = text.toLowerCase();
    const found = new Map();
    const matching = new Map();
    for (const row of rows) {
      if (!row.lane) continue;
      if (!matching.has(row.rank)) {
        const nodes = new Set();
        row.rank.nodes.forEach((node, index) => {
          if (node.node.toLowerCase().includes(wanted) || node.op.toLowerCase().includes(wanted)) {
            nodes.add(index);
          }
        });
        matching.set(row.rank, nodes);
      }
      const nodes = matching.get(row.rank);
      for (let i = 0; i < row.lane.count; i++) {
        const node = row.lane.nodes[i];
        if (!nodes.has(node)) continue;
        if (!found.has(row.order)) found.set(row.order, new Map());
        const best = found.get(row.order);
        const length = row.lane.ends[i] - row.lane.starts[i];
        if (!best.has(node) || best.get(node).length < length) best.set(node, { row, i, length });
      }
    }
    const hits = [];
    for (const best of found.values()) {
      hits.push(...[...best.values()].sort((a, b) => start(a) - start(b)));
    }
    return hits;
  }

  const start = (hit) => hit.row.lane.starts[hit.i];

  return { RULER, layOut, firstFrom, blockAt, bytesAt, search };
})();
