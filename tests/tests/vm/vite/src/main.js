// The title tells the value, and how often this page was loaded: a hot update changes one and not the other.
import { value } from "./value.js";

const loads = Number(sessionStorage.getItem("loads") ?? 0) + 1;
sessionStorage.setItem("loads", String(loads));
const tell = (value) => {
  document.title = JSON.stringify({ value, loads });
};
tell(value);
import.meta.hot.accept("./value.js", (next) => tell(next.value));
