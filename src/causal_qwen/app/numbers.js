// The browser's own input event also reports pasted, deleted and composed text; Gradio's does not.
document.addEventListener('input', event => {
  if (!event.target.closest('#number-text')) return;
  for (const old of document.querySelectorAll('.prediction .cq'))
    old.classList.add('stale');
  setTimeout(() => trigger('edit'));
});
const PIXELS = 320;  // from one end of the range to the other
let held = null;
const numberAt = event => event.target.closest('[data-index]');
// 0 to twice the number, in steps of its last written decimal; -10 to 10 for 0.
const read = number => {
  const start = Number(number.dataset.start), far = Math.max(-1e300, Math.min(2 * start, 1e300));
  const [low, high] = start ? [Math.min(0, far), Math.max(0, far)] : [-10, 10];
  const decimals = number.dataset.written.match(/[.](\d+)/)?.[1].length ?? 0;
  const written = 10 ** -decimals, fine = Number(((high - low) / 1000).toPrecision(1));
  const step = written > (high - low) / 2 ? fine : Math.max(written, fine);
  return {index: Number(number.dataset.index), value: Number(number.dataset.value), low, high, step};
};
const move = (number, wanted) => {
  const {index, low, high, step, value} = read(number);
  const near = low + Math.round((wanted - low) / step) * step;
  const now = Number(Math.min(Math.max(near, low), high).toPrecision(12));
  if (now === value) return;
  number.dataset.value = number.textContent = now;
  number.setAttribute('aria-valuenow', now);
  window.dragged = [index, now];
  trigger('input');
};
element.addEventListener('pointerdown', event => {
  const number = numberAt(event);
  if (!number) return;
  event.preventDefault();
  number.focus();
  number.setPointerCapture(event.pointerId);
  held = {number, from: event.clientX, value: read(number).value};
});
element.addEventListener('pointermove', event => {
  if (!held) return;
  const {low, high} = read(held.number);
  move(held.number, held.value + (event.clientX - held.from) / PIXELS * (high - low));
});
for (const end of ['pointerup', 'pointercancel']) element.addEventListener(end, () => held = null);
element.addEventListener('keydown', event => {
  const number = numberAt(event);
  if (!number) return;
  const {low, high, step, value} = read(number);
  const stride = Math.max(step, (high - low) / 50);
  const wanted = {
    ArrowLeft: value - stride, ArrowDown: value - stride, Home: low,
    ArrowRight: value + stride, ArrowUp: value + stride, End: high,
  }[event.key];
  if (wanted === undefined) return;
  event.preventDefault();
  move(number, wanted);
});
