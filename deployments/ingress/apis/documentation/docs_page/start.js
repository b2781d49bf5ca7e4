"use strict";

SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#api",
  deepLinking: true,
  displayRequestDuration: true,
  // Its default sends the document's address to a service on the internet.
  validatorUrl: null,
});
