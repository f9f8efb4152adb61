// Builds the UI into the Python package: fixed names, no inline code, the same bytes from the same sources.
import preact from "@preact/preset-vite";
import { defineConfig } from "vite";

export default defineConfig({
  plugins: [preact({ devToolsEnabled: false, prefreshEnabled: false })],
  build: {
    outDir: process.env.FUSED_KV_STATIC ?? "../src/fused_kv_llm/server/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    rolldownOptions: {
      output: {
        entryFileNames: "assets/app.js",
        assetFileNames: "assets/app[extname]",
        codeSplitting: false,
      },
    },
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8000", "/health": "http://127.0.0.1:8000" } },
});
