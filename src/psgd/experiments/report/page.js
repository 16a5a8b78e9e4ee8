// Draws the plots. A click on a name hides it or shows it, a double click leaves it alone, pointing at it picks it out.
"use strict";
for (const source of document.querySelectorAll("script[data-plot]")) {
  const item = JSON.parse(source.textContent);
  const buttons = [...source.closest("figure").querySelectorAll(".legend button")];
  Bokeh.embed.embed_item(item).then((views) => {
    const drawing = views.roots[0].model.document;
    const show = (button, on) => {
      button.setAttribute("aria-pressed", String(on));
      for (const id of button.dataset.parts.split(" ")) drawing.get_model_by_id(id).visible = on;
    };
    const shown = (button) => button.getAttribute("aria-pressed") === "true";
    const point = (button) => {
      for (const other of buttons) {
        const muted = button !== null && shown(button) && other !== button;
        for (const id of other.dataset.parts.split(" ")) drawing.get_model_by_id(id).muted = muted;
      }
    };
    for (const button of buttons) {
      button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && point(button));
      button.addEventListener("pointerleave", () => point(null));
      button.addEventListener("click", () => show(button, !shown(button)));
      button.addEventListener("dblclick", () => {
        const alone = buttons.every((other) => other === button || !shown(other));
        for (const other of buttons) show(other, alone || other === button);
      });
    }
    source.closest("figure").dataset.drawn = "yes";
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));
