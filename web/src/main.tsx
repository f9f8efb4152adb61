import { render } from "preact";

import { Shell } from "./shell";
import "./styles/index.css";
import { applyTheme } from "./theme";

applyTheme();
const root = document.getElementById("app");
if (root) render(<Shell />, root);
