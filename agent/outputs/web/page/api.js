// The API's reference: Swagger UI over the agent's OpenAPI document, with try-out.
import {authorization} from "./query.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow_scheme = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow_scheme);
follow_scheme();

window.SwaggerUIBundle({
  url: "/openapi.json",
  domNode: document.getElementById("api"),
  // Nothing is sent to a server of Swagger.
  validatorUrl: null,
  tryItOutEnabled: true,
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  tagsSorter: "alpha",
  requestInterceptor: (request) => ({...request, headers: {...request.headers, ...authorization()}}),
});
