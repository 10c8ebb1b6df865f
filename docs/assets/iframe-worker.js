// Browsers refuse workers to pages from file://, and the search of this site runs in one. There, and only
// there, a hidden frame does the work. Without this file the theme would load one from another site.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.inside = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          // What the worker says is heard out here; scripts that it asks for are loaded in order.
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const load = (src) => new Promise((done, failed) => {
            const script = inside.document.createElement("script");
            Object.assign(script, { src, onload: done, onerror: failed });
            inside.document.body.append(script);
          });
          inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
          load(new URL(url, location.href).href).then(() => resolve(inside));
        };
      });
      document.body.append(frame);
      this.terminate = () => frame.remove();
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
