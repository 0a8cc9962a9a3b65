#!/bin/bash
touch shoe.txt
