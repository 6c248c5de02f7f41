// The API's reference: Swagger UI over the agent's OpenAPI document, with try-out.
import {authorization} from "./query.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow_scheme = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow_scheme);
follow_scheme();

const holder = document.getElementById("api");

// What scrolls can be scrolled by the keyboard.
new MutationObserver(() => {
  for (const code of holder.querySelectorAll("pre:not([tabindex])")) code.tabIndex = 0;
}).observe(holder, {childList: true, subtree: true});

window.SwaggerUIBundle({
  url: "/openapi.json",
  domNode: holder,
  // Nothing is sent to a server of Swagger.
  validatorUrl: null,
  tryItOutEnabled: true,
  // A link in the button of each operation could not be reached by a screen reader.
  deepLinking: false,
  defaultModelsExpandDepth: 0,
  tagsSorter: "alpha",
  // The page's own login is used.
  plugins: [() => ({wrapComponents: {authorizeBtn: () => () => null, authorizeOperationBtn: () => () => null}})],
  requestInterceptor: (request) => ({...request, headers: {...request.headers, ...authorization()}}),
});
