// The selectors that a request can ask for, as docs/methods.md lists them.
export const SELECTORS = [
  "sink_attention",
  "qcfuse",
  "fusionrag",
  "cacheblend",
  "cache_craft",
  "prefill_h2o",
  "kvshare",
  "prophetkv",
  "all_layers",
  "middle_layers",
  "boundary",
  "random",
  "full_reuse",
] as const;
