// Search in pages that are opened from the disk: browsers start no worker there, so its script runs in a hidden frame.
// The theme looks for a script of this name before it would fetch one from elsewhere.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      inner.document.open()
      inner.document.write("<!doctype html><body></body>")
      inner.document.close()
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        script.src = new URL(address, document.baseURI).href
        script.onload = () => resolve(inner)
        script.onerror = () => reject(new Error(`${script.src} could not be read`))
        inner.document.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(inner => inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
