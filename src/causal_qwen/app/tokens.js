element.addEventListener('click', event => {
  const button = event.target.closest('button[data-index]');
  if (!button) return;
  window.clicked = Number(button.dataset.index);
  trigger('select');
});
