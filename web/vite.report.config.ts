// Builds the page of a saved report: one script and one style, which Python puts into a file with the report's data.
import preact from "@preact/preset-vite";
import { defineConfig, type Plugin } from "vite";

const built = process.env.FUSED_KV_STATIC;

export default defineConfig({
  plugins: [preact({ devToolsEnabled: false, prefreshEnabled: false }), ascii()],
  publicDir: false,
  build: {
    outDir: built ? `${built}-report` : "../src/fused_kv_llm/report/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    reportCompressedSize: false,
    rolldownOptions: {
      input: "src/report-file.tsx",
      output: {
        format: "iife",
        entryFileNames: "report.js",
        assetFileNames: "report[extname]",
      },
    },
  },
});

/** Files are often written without a thought of their encoding, so that the script has only ASCII. */
function ascii(): Plugin {
  return {
    name: "ascii",
    generateBundle(_, bundle) {
      for (const file of Object.values(bundle)) {
        if (file.type !== "chunk") continue;
        file.code = file.code.replace(/[^\x00-\x7f]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
      }
    },
  };
}
