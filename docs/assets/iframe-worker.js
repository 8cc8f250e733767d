// The search runs in a worker, which browsers do not start for pages from disk: there it runs in a
// hidden frame instead, which takes and sends the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      this.ready = new Promise((loaded) => {
        inside.document.open()
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        inside.loaded = loaded
        inside.document.write(`<script src="${url}" onload="loaded()"><\/script>`)
        inside.document.close()
      })
      this.frame = frame
    }

    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
      )
    }

    terminate() {
      this.frame.remove()
    }
  }
}
