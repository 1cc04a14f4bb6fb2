/** Tell `changed` whether `node` can be seen: the page is in front and the node is in its window. Returns the end of it. */
export function watchVisibility(node: Element, changed: (visible: boolean) => void): () => void {
  let isInWindow = true;
  const tell = (): void => {
    changed(isInWindow && document.visibilityState === 'visible');
  };
  const observer = new IntersectionObserver(entries => {
    isInWindow = entries[entries.length - 1]?.isIntersecting ?? isInWindow;
    tell();
  });
  observer.observe(node);
  document.addEventListener('visibilitychange', tell);
  return () => {
    observer.disconnect();
    document.removeEventListener('visibilitychange', tell);
  };
}
