// Draws the plots, and lets the legends hide and show.
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
    for (const button of buttons) {
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
