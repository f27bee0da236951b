// A finger that taps a chart counts as a pointer that rests there: Bokeh describes what a pointer moves over, and forgets it when it leaves.
document.addEventListener("pointerup", (lifted) => {
  if (lifted.pointerType !== "touch") {
    return;
  }
  const place = lifted.composedPath()[0];
  const { clientX, clientY } = lifted;
  // With a view, or the position would leave out how far the page is scrolled.
  const resting = { clientX, clientY, view: window, pointerType: "mouse", isPrimary: true, bubbles: true, composed: true };
  setTimeout(() => place.dispatchEvent(new PointerEvent("pointermove", resting)), 0);
}, true);
