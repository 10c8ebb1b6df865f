// Draw what there is a place for.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const memory = document.getElementById("memory");
  const frontier = document.getElementById("frontier");
  const sizes = document.getElementById("sizes");
  const modules = document.getElementById("modules");
  if (memory) memoryChart(memory, data.curves, data.budget);
  const stack = document.getElementById("stack");
  if (stack) stackChart(stack, data.stacks, data.budget);
  if (frontier) frontierChart(frontier, data.points, data.plain_time, data.budget);
  if (sizes) sizesChart(sizes, data.sizes, data.plain_size);
  if (modules) {
    const { texts } = data;
    const rows = data.rows.map(([path, op, fate, bytes, seconds, reason]) => {
      const row = { path: texts[path], op: texts[op], fate, bytes, seconds, reason: texts[reason] };
      row.text = `${row.path} ${row.op} ${data.fates[fate]} ${row.reason}`.toLowerCase();
      return row;
    });
    new Tree(modules, rows, data.fates);
  }
})();
